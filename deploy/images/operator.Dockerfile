# The operator: kopf, the solver and the Kubernetes client. build.py builds it from the root of the repository.
# BASE must contain a Python that can make virtual environments, at the same path in all stages; releases pin it by digest.
ARG BASE=python:3.11.14-slim-bookworm
# It provides strip; the image contains no part of it.
ARG COMPILER=gcc:12.5.0-bookworm

FROM ${BASE} AS needs
# For builders without a package index: --no-index --find-links=FOLDER, with the folder mounted into the build.
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml requirements-images.lock deploy/images/requirements.py ./
RUN python3 -m venv /opt/perseus \
 && python3 requirements.py operator > needed.txt \
 && /opt/perseus/bin/pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes -r needed.txt \
 && echo /opt/app > "$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/app.pth"

FROM needs AS slim
# Remove what this project does not import, a third of what pip installs: pandas, which parts of OR-Tools require, and these
# parts; the Kubernetes client's synchronous half, and what only that requires; tests and build tools of NumPy. A test imports
# the project's modules without them.
RUN /opt/perseus/bin/pip uninstall --yes pandas requests requests-oauthlib oauthlib websocket-client pip setuptools \
 && cd "$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && find kubernetes -mindepth 1 -maxdepth 1 ! -name aio ! -name __init__.py -exec rm -r {} + && : > kubernetes/__init__.py \
 && cd ortools && rm -r algorithms bop constraint_solver glop init math_opt packing pdlp sat scheduling set_cover && cd .. \
 && rm -r numpy/distutils numpy/f2py && find numpy -type d -name tests -prune -exec rm -r {} + \
 && find . -name '*.pyi' -delete

# Remove debug symbols, two thirds of the extension modules. NumPy's libraries are not changed, because they have been patched.
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
# Of the project, keep only the packages that this image needs.
RUN python3 requirements.py build-system > build.txt \
 && /opt/perseus/bin/pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes --target /opt/build -r build.txt \
 && PYTHONPATH=/opt/build /opt/perseus/bin/pip install --no-cache-dir --no-index --no-build-isolation --no-deps --target /opt/app . \
 && /opt/perseus/bin/pip uninstall --yes pandas requests requests-oauthlib oauthlib websocket-client pip setuptools \
 && cd /opt/app && rm -r perseus_agent perseus_client \
 && find bin -type f ! -name perseus -a ! -name perseus-operator -delete \
 && /opt/perseus/bin/python /src/sbom.py perseus-operator > sbom.cdx.json

FROM ${BASE}
# In two layers: a new version of the project changes only the small one.
COPY --from=stripped /opt/perseus /opt/perseus
COPY --from=build /opt/app /opt/app
COPY LICENSE /licenses/LICENSE
# USER: kopf requests the name of its user, and a user id without an entry (this one, or one that a cluster chooses) has none.
ENV PATH=/opt/app/bin:/opt/perseus/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=perseus HOME=/tmp
# Check that everything that the program imports is in the image, with this BASE too.
RUN python -c "import perseus_operator.handlers, perseus_operator.solving.pool, perseus_solver.frontier"
USER 65532:65532
EXPOSE 9472
# For container engines; Kubernetes uses the chart's probes.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9472/healthz', timeout=4)"]
ENTRYPOINT ["perseus-operator"]
