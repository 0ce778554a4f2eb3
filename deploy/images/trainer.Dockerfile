# A training job that marks instructions and computes nothing, and a serving engine that serves nobody, for nodes with simulated
# GPUs: the client, as in any training image, and no framework. NumPy reads the profile; an engine shows its metrics. build.py builds it from the root of the repository.
# BASE must contain a Python that can make virtual environments, at the same path in all stages; releases pin it by digest.
# The same sources give the same bytes: compiled modules name no time, because a builder may set the times of files.
ARG BASE=python:3.11.14-slim-bookworm

# Whatever runs in a build runs on the builder's platform; an image of another one is only copied together.
FROM --platform=${BUILDPLATFORM} ${BASE} AS needs
ARG TARGETARCH
# For builders without a package index: --no-index --find-links=FOLDER, with the folder mounted into the build.
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml requirements-images.lock deploy/images/requirements.py ./
RUN python3 -m venv /opt/perseus \
 && python3 requirements.py numpy prometheus-client > needed.txt \
 && packages="$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && /opt/perseus/bin/pip install --no-cache-dir --no-compile ${PIP_OPTIONS} --require-hashes -r needed.txt \
    --target "$packages" $(python3 requirements.py --wheels-for ${TARGETARCH}) \
 && rm -rf "$packages/bin" && echo /opt/app > "$packages/app.pth"

FROM needs AS slim
RUN /opt/perseus/bin/pip uninstall --yes pip setuptools \
 && cd "$(/opt/perseus/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && find numpy -type d -name tests -prune -exec rm -r {} + \
 && PYTHONHASHSEED=0 /opt/perseus/bin/python -m compileall -q --invalidation-mode=unchecked-hash /opt/perseus

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
 && /opt/perseus/bin/pip uninstall --yes pip setuptools \
 && cd /opt/app && rm -r perseus_agent perseus_reader perseus_bench perseus_operator \
 && find bin -type f -delete \
 && PYTHONHASHSEED=0 /opt/perseus/bin/python -m compileall -q --invalidation-mode=unchecked-hash /opt/app \
 && /opt/perseus/bin/python /src/sbom.py perseus-trainer > sbom.cdx.json

# buildah would take the other stages' BASE without a platform.
FROM --platform=${TARGETPLATFORM} ${BASE} AS image
# In two layers: a new version of the project changes only the small one.
COPY --from=slim /opt/perseus /opt/perseus
COPY --from=build /opt/app /opt/app
COPY LICENSE /licenses/LICENSE
ENV PATH=/opt/perseus/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "perseus_sim.training.pod_job"]

# Built beside the image where this machine can run it: everything that the program imports is in it, with this BASE too.
FROM image AS checked
RUN python -c "import perseus_sim.training.pod_rank, perseus_sim.training.job, perseus_sim.serving.pod_engine"
