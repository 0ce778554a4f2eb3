# The operator: kopf, the solver and the Kubernetes client. Built from the root of the repository by build.py.
# BASE must hold a Python that can make virtual environments, at the same place in all stages; releases pin it by digest.
ARG BASE=python:3.11.14-slim-bookworm
# It brings strip; nothing of it stays.
ARG COMPILER=gcc:12.5.0-bookworm

FROM ${BASE} AS needs
# For builders without a package index: --no-index --find-links of a folder mounted into the build.
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml requirements.lock deploy/images/requirements.py ./
RUN python3 -m venv /opt/perseus \
 && python3 requirements.py operator > needed.txt \
 && /opt/perseus/bin/pip install --no-cache-dir ${PIP_OPTIONS} -c requirements.lock -r needed.txt \
 && echo /opt/app > "$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/app.pth"

FROM needs AS slim
# What nobody here imports, a third of what pip installs: pandas, which parts of OR-Tools ask for, and these parts; the
# Kubernetes client's synchronous half, and what only that needs; tests and builds of NumPy. A test runs ours without.
RUN /opt/perseus/bin/pip uninstall --yes pandas requests requests-oauthlib oauthlib websocket-client pip setuptools \
 && cd "$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && find kubernetes -mindepth 1 -maxdepth 1 ! -name aio ! -name __init__.py -exec rm -r {} + && : > kubernetes/__init__.py \
 && cd ortools && rm -r algorithms bop constraint_solver glop init math_opt packing pdlp sat scheduling set_cover && cd .. \
 && rm -r numpy/distutils numpy/f2py && find numpy -type d -name tests -prune -exec rm -r {} + \
 && find . -name '*.pyi' -delete

# What debuggers would read is two thirds of the extension modules. NumPy's libraries have been patched: they stay as they are.
FROM ${COMPILER} AS stripped
COPY --from=slim /opt/perseus /opt/perseus
RUN find /opt/perseus -name '*.so*' -type f ! -path '*/numpy*' -exec strip --strip-debug {} +

FROM needs AS build
ARG PIP_OPTIONS=""
COPY README.md LICENSE ./
COPY proto proto
COPY solver solver
COPY agent agent
COPY client client
COPY operator operator
COPY sim sim
COPY deploy/images/sbom.py ./
# Of the project, only the rooms that this image needs.
RUN /opt/perseus/bin/pip install --no-cache-dir ${PIP_OPTIONS} --no-deps --target /opt/app . \
 && /opt/perseus/bin/pip uninstall --yes pandas requests requests-oauthlib oauthlib websocket-client pip setuptools \
 && cd /opt/app && rm -r perseus_agent perseus_client \
 && find bin -type f ! -name perseus -a ! -name perseus-operator -delete \
 && /opt/perseus/bin/python /src/sbom.py perseus-operator > sbom.cdx.json

FROM ${BASE}
# In two layers: what a new version of the project brings is small.
COPY --from=stripped /opt/perseus /opt/perseus
COPY --from=build /opt/app /opt/app
COPY LICENSE /licenses/LICENSE
# USER: kopf asks for the name of who runs it, and a bare number (this one, or one that a cluster chooses) has none.
ENV PATH=/opt/app/bin:/opt/perseus/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=perseus HOME=/tmp
# What it runs finds all it wants, in BASE too.
RUN python -c "import perseus_operator.handlers, perseus_operator.solving.pool, perseus_solver.frontier"
USER 65532:65532
EXPOSE 9472
# For engines without probes of their own; Kubernetes uses the chart's.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9472/healthz', timeout=4)"]
ENTRYPOINT ["perseus-operator"]
