"""What the Dockerfiles copy, install and run, checked without building an image; and the rules of build.py.

tests/contract/test_image_contents.py has what is checked of an image that was built.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.dockerfiles import (
    EVERY,
    EXAMPLE,
    IMAGES,
    NAMES,
    PROGRAMS,
    PROJECT,
    ROOT,
    VALUES,
    build,
    closure,
    extra_of,
    installed,
    modules_taken_out,
    requirements,
    rooms,
    stage,
    stages,
)
from tests.offenders import about_each

from perseus_core import keys


@about_each(EVERY)
def test_copied_files_exist(name: str) -> None:
    seen: set[str] = set()
    for each in stages(name)[1]:
        for origin, sources in each.copies():
            assert origin is None or origin in seen, f"--from={origin} is no earlier stage"
            for source in sources if origin is None else ():
                assert list(ROOT.glob(source)), source
        seen.add(each.name)


@about_each(EVERY)
def test_whatever_an_index_serves_is_checked_against_a_hash(name: str) -> None:
    installs = [
        command
        for stage in stages(name)[1]
        for run in stage.all("RUN")
        for command in run.split("&&")
        if "pip install " in command
    ]
    assert len(installs) == 3
    for install in installs:
        assert " --require-hashes " in install or (" --no-index " in install and install.strip().endswith(" ."))


LOCK = (ROOT / "requirements-images.lock").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("lock", "tested"),
    [
        ("requirements-images.lock", "requirements.lock"),
        ("requirements-example.lock", "requirements-frameworks.lock"),
    ],
)
def test_an_images_lock_has_a_hash_for_every_package_and_the_versions_that_are_tested(lock: str, tested: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    assert "://" not in text
    assert set(re.findall(r"--[a-z-]+", text)) == {"--hash"}
    versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    others = (ROOT / tested).read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", others, re.MULTILINE))
    assert {name: pinned.get(name, version) for name, version in versions.items()} == versions
    for name in versions:
        assert any("--hash=sha256:" in line for line in requirements.pinned(text, [name])[1:]), name


@about_each(PROGRAMS)
def test_what_an_image_installs_is_what_its_packages_require(program: str) -> None:
    lines = requirements.pinned(LOCK, requirements.wanted_by(PROJECT, extra_of(program)))
    assert {line.partition("==")[0] for line in lines if not line.startswith(" ")} >= closure(program) - {"tzdata"}


def test_a_package_that_the_lock_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        requirements.pinned(LOCK, ["no-such-package"])


PINNED = "python:3.11.14-slim-bookworm@sha256:" + 64 * "a"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "PUSH: BASE must be name:version@sha256:<64 hexadecimal digits>, not ''"),
        ({"BASE": "python:3.11.14"}, "PUSH: BASE must be"),
        ({"BASE": PINNED, "COMPILER": PINNED[:-1]}, "PUSH: COMPILER must be"),
        ({"NAMES": EXAMPLE, "BASE": PINNED, "COMPILER": PINNED}, "PUSH: TORCH must be"),
        ({"BASE": PINNED, "COMPILER": PINNED}, "PUSH: BASE_DATE must be a day, YYYY-MM-DD, not ''"),
        ({"REGISTRY": "localhost", "BASE": PINNED, "COMPILER": PINNED}, "PUSH: BASE_DATE must be"),
        ({"BASE": PINNED, "COMPILER": PINNED, "BASE_DATE": "2026-11-23"}, "no builder"),
        ({"REGISTRY": "127.0.0.1:5000/perseus"}, "no builder"),
    ],
)
def test_nothing_is_pushed_whose_base_a_digest_does_not_name(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PUSH": "yes", **environment}
    command = [sys.executable, str(IMAGES / "build.py"), *environment.get("NAMES", "").split()]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert message in refused.stderr


@about_each(NAMES)
def test_every_room_of_the_wheel_is_copied_and_not_ignored(name: str) -> None:
    copied = {
        source for each in stages(name)[1] for origin, sources in each.copies() if origin is None for source in sources
    }
    folders = {Path(package).parts[0] for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    project = PROJECT["project"]
    assert copied >= folders | {"pyproject.toml", project["readme"], *project["license-files"]}
    included = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert included - copied <= {"deploy/gpu-sim/nvml_shim.c", "requirements-example.lock", "examples/steps/*.py"}
    assert all(any(Path(source).is_relative_to(each) for each in included) for source in copied)


def test_the_example_trains_with_what_its_folder_has_and_nothing_of_the_operator() -> None:
    [script] = re.findall(
        r"train_\w+\.py", json.dumps(training_job()["spec"]["template"]["spec"]["containers"][0]["command"])
    )
    assert (ROOT / "examples" / "steps" / script).exists()
    copied = {
        source
        for each in stages(EXAMPLE)[1]
        for origin, sources in each.copies()
        if origin is None
        for source in sources
    }
    included = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied <= included
    assert rooms(EXAMPLE) == {"perseus_client", "perseus_core", "perseus_proto", "perseus_sim"}


def test_the_example_of_kubectl_apply_runs_the_image_that_is_built() -> None:
    [container] = training_job()["spec"]["template"]["spec"]["containers"]
    chart = yaml.safe_load((ROOT / "charts" / "perseus" / "Chart.yaml").read_text(encoding="utf-8"))
    assert container["image"] == f"perseus-{EXAMPLE}:{chart['appVersion']}"


def training_job() -> dict[str, Any]:
    text = (ROOT / "examples" / "steps" / "training-job.yaml").read_text(encoding="utf-8")
    [job] = [each for each in yaml.safe_load_all(text) if each["kind"] == "Job"]
    return dict(job)


@about_each(PROGRAMS)
def test_it_runs_an_entry_point_and_contains_only_what_that_requires(name: str) -> None:
    [entry_point] = stage(name, "image").all("ENTRYPOINT")
    assert entry_point == f'["perseus-{name}"]'
    assert f"perseus-{name}" in PROJECT["project"]["scripts"]
    assert installed(name) <= closure(name)
    assert VALUES[{"bench": "acceptance"}.get(name, name)]["image"]["repository"] == f"perseus-{name}"


def test_every_image_contains_only_what_its_program_requires() -> None:
    assert (
        installed("agent")
        == installed("bench")
        == {"grpcio", "typing-extensions", "protobuf", "nvidia-ml-py", "prometheus-client"}
    )
    assert installed("gpu-sim") == {"grpcio", "typing-extensions", "protobuf"}
    assert installed("trainer") == {"numpy", "prometheus-client"}
    assert {"ortools", "kopf", "kubernetes"} <= installed("operator")
    assert "ortools" in installed("solver")
    assert not installed("solver") & {"kopf", "kubernetes", "aiohttp", "opentelemetry-sdk"}
    shared = {"perseus_core", "perseus_proto", "perseus_runtime"}
    assert rooms("solver") == shared | {"perseus_operator", "perseus_solver"}
    assert rooms("agent") == shared | {"perseus_agent", "perseus_reader"}
    assert rooms("bench") == shared | {"perseus_agent", "perseus_bench"}
    assert rooms("gpu-sim") == {"perseus_sim", "perseus_core", "perseus_proto"}
    assert "perseus_client" in rooms("trainer")
    assert "perseus_agent" not in rooms("operator")


@about_each(NAMES)
def test_no_code_of_another_platform_runs_in_a_build(name: str) -> None:
    *others, checked = stages(name)[1]
    assert (checked.name, checked.base, others[-1].name) == ("checked", "image", "image")
    assert stage(name, "image").platform == "${TARGETPLATFORM}"
    assert stage(name, "image").all("RUN") == []
    assert {each.platform for each in others[:-1]} == {"${BUILDPLATFORM}"}
    # What a stage takes depends on the platform of the image, so that it must know it.
    for each in others[:-1]:
        uses = any("${TARGETARCH}" in run for run in each.all("RUN"))
        assert uses == ("TARGETARCH" in each.all("ARG")), each.name
    assert any("--wheels-for ${TARGETARCH}" in run for run in stage(name, "needs").all("RUN"))


@about_each(EVERY)
def test_images_get_no_compiled_marks_which_would_be_for_the_builders_machine(name: str) -> None:
    [install] = [part for part in stage(name, "build").all("RUN")[0].split("&&") if part.strip().endswith(" .")]
    assert "HATCH_BUILD_NO_HOOKS=true " in install


@about_each(["operator", "solver"])
def test_the_solvers_loops_are_compiled_for_the_image_as_installations_compile_them(name: str) -> None:
    [run] = stage(name, "library").all("RUN")
    given = shlex.split(run.partition("&&")[0])
    hook = ast.parse((ROOT / "deploy" / "build_compiled.py").read_text())
    values = {each.target.id: each.value for each in hook.body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
    assert {*ast.literal_eval(values["ALWAYS"]), *ast.literal_eval(values["SOLVER"]), "-lm"} <= set(given)
    sources = ast.literal_eval(values["LOOPS"].args[0])  # type: ignore[union-attr]
    assert [Path(source).name for source in sources] == [Path(part).name for part in given if part.endswith(".c")]
    assert (str(Path(sources[0]).parent), "/src") == tuple(stage(name, "library").all("COPY")[0].split())
    assert "/library.so /opt/app/perseus_solver/compiled/library.so" in stage(name, "build").all("COPY")[-1]


@pytest.mark.parametrize("architecture", ["amd64", "arm64"])
def test_pip_is_asked_for_wheels_of_the_images_architecture_alone(architecture: str) -> None:
    options = requirements.wheel_options(architecture)
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[architecture]
    assert "--only-binary=:all:" in options
    assert {f"--platform=manylinux_2_28_{machine}", f"--platform=manylinux2014_{machine}"} <= set(options)
    assert all(option.endswith(machine) for option in options[1:])


@about_each(NAMES)
def test_no_image_contains_the_compiler(name: str) -> None:
    arguments, _ = stages(name)
    image = stage(name, "image")
    assert image.base == arguments["BASE"]
    for origin, sources in image.copies():
        assert origin is None or all(source.startswith(("/opt/", "/libnvidia-ml.so.1")) for source in sources)


_WITHOUT = """
import sys
from importlib.machinery import PathFinder
absent = set(sys.argv[1].split(","))
class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in absent or any(name == gone or name.startswith(gone + ".") for gone in absent):
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
if "kubernetes.client" in absent:  # as in the image, where this file is empty
    import types
    package = types.ModuleType("kubernetes")
    package.__path__ = PathFinder.find_spec("kubernetes").submodule_search_locations
    sys.modules["kubernetes"] = package
for module in sys.argv[2].split(","):
    __import__(module)
"""


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("agent", "perseus_agent.__main__,perseus_agent.lifecycle,perseus_agent.devices.nvml"),
        ("bench", "perseus_bench.command,perseus_bench.locker,perseus_agent.lifecycle,perseus_agent.devices.nvml"),
        ("gpu-sim", "perseus_sim.gpus.offer"),
        (
            "trainer",
            "perseus_sim.training.pod_job,perseus_sim.training.pod_rank,perseus_sim.training.job,perseus_solver.model.profile",
        ),
        ("trainer", "perseus_sim.serving.pod_engine"),
        ("agent", "perseus_reader.__main__"),
        (
            "operator",
            "perseus_operator.__main__,perseus_operator.solving.pool,perseus_solver.frontier,perseus_solver.cli.main",
        ),
        (
            "operator",
            "perseus_solver.relaxation.flow,perseus_solver.calibration.linear_program,perseus_operator.clients.kube.client",
        ),
        ("operator", "ortools.graph.python.min_cost_flow,ortools.graph.python.max_flow,ortools.linear_solver.pywraplp"),
        (
            "solver",
            "perseus_operator.servers.solver.__main__,perseus_operator.solving.worker,perseus_operator.solving.calibration,"
            "perseus_operator.solving.rehearsed,perseus_solver.frontier,perseus_solver.cli.main",
        ),
        ("operator", "perseus_operator.clients.otlp"),
        ("operator", "kubernetes.aio.client,kubernetes.aio.config,perseus_sim.profiles"),  # the chart's own test
    ],
)
def test_the_imports_of_every_program_are_installed(name: str, modules: str) -> None:
    inside = installed(name) | {PROJECT["project"]["name"]}
    owners = {
        top: {re.sub(r"[-_.]+", "-", owner).lower() for owner in names}
        for top, names in metadata.packages_distributions().items()
    }
    absent = {top for top, names in owners.items() if not names & inside}
    absent |= modules_taken_out(name)
    absent |= {top for top in owners if top.startswith("perseus_")} - rooms(name)
    absent |= {Path(p).name for p in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]} - rooms(name)
    assert "pytest" in absent
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT, ",".join(sorted(absent)), modules], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.strip().rpartition("\n")[2]


@about_each(EVERY)
def test_every_base_is_an_argument_and_a_version(name: str) -> None:
    arguments, found = stages(name)
    assert list(arguments) == build.arguments_of(name)
    names = {stage.name for stage in found}
    assert {stage.base for stage in found} - names == set(arguments.values())
    assert all(re.match(r"[\w/-]+:\d+\.\d+", image) for image in arguments.values())


@about_each(NAMES)
def test_the_base_has_a_python_that_is_tested(name: str) -> None:
    arguments, _ = stages(name)
    tag = arguments["BASE"].partition(":")[2]
    assert re.match(r"\d+\.\d+\.\d+", tag), "a version, not a moving tag"
    minor = ".".join(tag.split(".")[:2])
    assert f"Programming Language :: Python :: {minor}" in PROJECT["project"]["classifiers"]


def test_user_and_health_check() -> None:
    template = (ROOT / "charts" / "perseus" / "templates" / "operator-deployment.yaml").read_text(encoding="utf-8")
    chart_user = re.findall(r"runAsUser: (\d+)", template)
    [user] = stage("operator", "image").all("USER")
    assert user == f"{chart_user[0]}:{chart_user[0]}"
    assert int(chart_user[0]) > 0
    for name in ("agent", "bench", "gpu-sim"):
        assert stage(name, "image").all("USER") == ["0:0"]
    assert stage("trainer", "image").all("USER") == stage("solver", "image").all("USER") == ["65532:65532"]
    for name, port, exposed in (
        ("operator", keys.DEFAULT_OPERATOR_METRICS_PORT, [keys.DEFAULT_OPERATOR_METRICS_PORT]),
        ("solver", keys.DEFAULT_SOLVER_METRICS_PORT, [keys.DEFAULT_SOLVER_PORT, keys.DEFAULT_SOLVER_METRICS_PORT]),
        ("agent", keys.DEFAULT_AGENT_METRICS_PORT, [keys.DEFAULT_GRPC_PORT, keys.DEFAULT_AGENT_METRICS_PORT]),
    ):
        final = stage(name, "image")
        assert f"http://127.0.0.1:{port}/healthz" in final.all("HEALTHCHECK")[0]
        assert final.all("EXPOSE") == [" ".join(map(str, exposed))]


def test_the_operator_has_a_user_name_although_its_user_id_has_none() -> None:
    # kopf calls getpass.getuser() at its start, which reads the password file if the environment has no name.
    [assignments] = stage("operator", "image").all("ENV")
    environment = dict(word.split("=", 1) for word in shlex.split(assignments))
    code = "import getpass, os; os.getuid = lambda: 4_000_000_000; print(getpass.getuser())"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "perseus", ran.stderr


def test_the_bill_lists_the_installed_packages() -> None:
    printed = subprocess.run(
        [sys.executable, str(IMAGES / "sbom.py"), "perseus-agent"], capture_output=True, text=True, check=True
    )
    bill = json.loads(printed.stdout)
    assert bill["metadata"]["component"]["version"] == PROJECT["project"]["version"]
    named = {component["name"]: component["version"] for component in bill["components"]}
    assert named["grpcio"] == metadata.version("grpcio")
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])


def test_versions_agree() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "perseus" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == PROJECT["project"]["version"]
