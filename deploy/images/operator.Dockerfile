# The operator: kopf, the solver and the Kubernetes client. Built from the root of the repository by build.sh.
# BASE must hold a Python that can make virtual environments, at the same place in both stages; releases pin it by digest.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
# For builders without a package index: --no-index --find-links of a folder mounted into the build.
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY proto proto
COPY solver solver
COPY agent agent
COPY client client
COPY operator operator
COPY sim sim
COPY deploy/images/sbom.py ./
# OR-Tools asks for pandas, for parts of it that nobody here imports; a test runs ours without it. 85 MB.
RUN python3 -m venv /opt/perseus \
 && /opt/perseus/bin/pip install --no-cache-dir ${PIP_OPTIONS} -c requirements.lock ".[operator]" \
 && /opt/perseus/bin/pip uninstall --yes pandas pip \
 && /opt/perseus/bin/python sbom.py perseus-operator > /opt/perseus/sbom.cdx.json

FROM ${BASE}
COPY --from=build /opt/perseus /opt/perseus
COPY LICENSE /licenses/LICENSE
# USER: kopf asks for the name of who runs it, and a bare number (this one, or one that a cluster chooses) has none.
ENV PATH=/opt/perseus/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=perseus HOME=/tmp
USER 65532:65532
EXPOSE 9472
# For engines without probes of their own; Kubernetes uses the chart's.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9472/healthz', timeout=4)"]
ENTRYPOINT ["perseus-operator"]
