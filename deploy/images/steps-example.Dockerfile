# Real training on CPU, beside simulated GPUs: PyTorch, Accelerate, the client, and the scripts of examples/steps. build.py builds it
# from the root of the repository where it is asked for by name.
# Debian's PyTorch needs no CUDA. TORCH may have it already, as the local base of build.py does.
ARG TORCH=debian:13.2-slim

FROM ${TORCH} AS torch
RUN python3 -c "import ensurepip, torch" || { \
    apt-get update && apt-get install --yes --no-install-recommends python3-torch python3-venv && rm -r /var/lib/apt/lists/*; }

FROM torch AS build
# For builders without a package index: --no-index --find-links=FOLDER, with the folder mounted into the build.
ARG PIP_OPTIONS=""
WORKDIR /src
COPY pyproject.toml requirements-images.lock requirements-example.lock deploy/images/requirements.py README.md LICENSE ./
COPY core core
COPY runtime runtime
COPY proto proto
COPY solver solver
COPY agent agent
COPY bench bench
COPY client client
COPY operator operator
COPY sim sim
# Of the project, keep only the packages that this image needs.
RUN python3 -m venv /opt/pip \
 && /opt/pip/bin/pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes --no-deps --target /opt/needs -r requirements-example.lock \
 && python3 requirements.py build-system > build.txt \
 && /opt/pip/bin/pip install --no-cache-dir ${PIP_OPTIONS} --require-hashes --target /opt/build -r build.txt \
 && HATCH_BUILD_NO_HOOKS=true PYTHONPATH=/opt/build /opt/pip/bin/pip install --no-cache-dir --no-index --no-build-isolation --no-deps --target /opt/app . \
 && cd /opt/app && rm -r perseus_agent perseus_reader perseus_bench perseus_operator perseus_runtime perseus_solver bin

FROM torch AS image
COPY --from=build /opt/needs /opt/needs
COPY --from=build /opt/app /opt/app
COPY examples/steps/*.py /opt/steps/
COPY LICENSE /licenses/LICENSE
# Debian builds PyTorch without libuv, which its rendezvous would use.
ENV PYTHONPATH=/opt/app:/opt/needs PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 USE_LIBUV=0
WORKDIR /opt/steps
USER 65532:65532

# Built beside the image: everything that the program imports is in it, with this TORCH too.
FROM image AS checked
RUN python3 -c "import accelerate, model, perseus_client, perseus_sim.training.pod_live"
