# The operator: kopf, the solver and the Kubernetes client. build.py builds it from the root of the repository.
# BASE must contain a Python that can make virtual environments, at the same path in all stages; releases pin it by digest.
# The same sources give the same bytes: compiled modules name no time, because a builder may set the times of files.
ARG BASE=python:3.11.14-slim-bookworm
# It compiles the solver's inner loops and provides strip; for another platform packages of Debian's are added to it. The image contains no
# part of it.
ARG COMPILER=gcc:12.5.0-bookworm

# Whatever runs in a build runs on the builder's platform; an image of another one is only copied together.
FROM --platform=${BUILDPLATFORM} ${BASE} AS needs
ARG TARGETARCH
# For builders without a package index: --no-index --find-links=FOLDER, with the folder mounted into the build.
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml requirements-images.lock deploy/images/requirements.py ./
RUN python3 -m venv /opt/perseus \
 && python3 requirements.py operator > needed.txt \
 && packages="$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && /opt/perseus/bin/pip install --no-cache-dir --no-compile ${PIP_OPTIONS} --require-hashes -r needed.txt \
    --target "$packages" $(python3 requirements.py --wheels-for ${TARGETARCH}) \
 && rm -rf "$packages/bin" && echo /opt/app > "$packages/app.pth"

FROM needs AS slim
# Remove what this project does not import, a third of what pip installs: pandas, which parts of OR-Tools require, and these
# parts; the Kubernetes client's synchronous half, and what only that requires; tests and build tools of NumPy. A test imports
# the project's modules without them.
RUN /opt/perseus/bin/pip uninstall --yes pandas requests requests-oauthlib oauthlib websocket-client pip setuptools \
 && cd "$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && find kubernetes -mindepth 1 -maxdepth 1 ! -name aio ! -name __init__.py -exec rm -r {} + && : > kubernetes/__init__.py \
 && cd ortools && rm -r algorithms bop constraint_solver glop init math_opt packing pdlp sat scheduling set_cover && cd .. \
 && rm -r numpy/distutils numpy/f2py && find numpy -type d -name tests -prune -exec rm -r {} + \
 && find . -name '*.pyi' -delete \
 && PYTHONHASHSEED=0 /opt/perseus/bin/python -m compileall -q --invalidation-mode=unchecked-hash /opt/perseus

# Remove debug symbols, two thirds of the extension modules, and symbols that the loader does not read. NumPy's libraries are not changed, because they have been patched.
FROM --platform=${BUILDPLATFORM} ${COMPILER} AS tools
ARG TARGETARCH
RUN machine=$(echo ${TARGETARCH} | sed 's/amd64/x86_64/; s/arm64/aarch64/') \
 && gcc=$(command -v ${machine}-linux-gnu-gcc) || { \
    apt-get update && apt-get install --yes --no-install-recommends gcc-$(echo ${machine} | tr _ -)-linux-gnu \
      libc6-dev-${TARGETARCH}-cross \
 && gcc=$(command -v ${machine}-linux-gnu-gcc); } \
 && ln -s ${gcc} /usr/local/bin/gcc-target && ln -s ${gcc%gcc}strip /usr/local/bin/strip-target

FROM tools AS library
COPY solver/perseus_solver/compiled /src
RUN gcc-target -Wall -Wextra -fPIC -shared -std=c11 -O3 -ffp-contract=off \
      /src/simplex.c /src/sweeps.c /src/control.c /src/execution.c -o /library.so -lm \
 && strip-target --strip-unneeded /library.so

FROM tools AS stripped
COPY --from=slim /opt/perseus /opt/perseus
RUN find /opt/perseus -name '*.so*' -type f ! -path '*/numpy*' -exec strip-target --strip-unneeded {} +

FROM needs AS build
ARG PIP_OPTIONS=""
COPY README.md LICENSE ./
COPY core core
COPY runtime runtime
COPY proto proto
COPY solver solver
COPY agent agent
COPY bench bench
COPY client client
COPY operator operator
COPY sim sim
COPY deploy/images/sbom.py ./
# Of the project, keep only the packages that this image needs.
RUN python3 requirements.py build-system > build.txt \
 && /opt/perseus/bin/pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes --target /opt/build -r build.txt \
 && HATCH_BUILD_NO_HOOKS=true PYTHONPATH=/opt/build /opt/perseus/bin/pip install --no-cache-dir --no-index --no-build-isolation --no-deps --no-compile --target /opt/app . \
 && /opt/perseus/bin/pip uninstall --yes pandas requests requests-oauthlib oauthlib websocket-client pip setuptools \
 && cd /opt/app && rm -r perseus_agent perseus_reader perseus_bench perseus_client \
 && find bin -type f ! -name perseus -a ! -name perseus-operator -delete \
 && PYTHONHASHSEED=0 /opt/perseus/bin/python -m compileall -q --invalidation-mode=unchecked-hash /opt/app \
 && /opt/perseus/bin/python /src/sbom.py perseus-operator > sbom.cdx.json
COPY --from=library /library.so /opt/app/perseus_solver/compiled/library.so

# buildah would take the other stages' BASE without a platform.
FROM --platform=${TARGETPLATFORM} ${BASE} AS image
# In two layers: a new version of the project changes only the small one.
COPY --from=stripped /opt/perseus /opt/perseus
COPY --from=build /opt/app /opt/app
COPY LICENSE /licenses/LICENSE
# USER: kopf requests the name of its user, and a user id without an entry (this one, or one that a cluster chooses) has none.
ENV PATH=/opt/app/bin:/opt/perseus/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=perseus HOME=/tmp
USER 65532:65532
EXPOSE 9472
# For container engines; Kubernetes uses the chart's probes.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9472/healthz', timeout=4)"]
ENTRYPOINT ["perseus-operator"]

# Built beside the image where this machine can run it: everything that the program imports is in it, with this BASE too.
FROM image AS checked
RUN python -c "import perseus_operator.servers.handlers, perseus_operator.solving.pool, perseus_solver.frontier, perseus_solver.compiled; perseus_solver.compiled.library()" \
 && python -c "import perseus_operator.clients.otlp"
