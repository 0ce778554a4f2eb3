"""What the Dockerfiles copy, install and run, checked without a builder."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from perseus_proto import keys

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
NAMES = ["operator", "agent"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((ROOT / "charts" / "perseus" / "values.yaml").read_text(encoding="utf-8"))


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [words for name, words in self.instructions if name == instruction]

    def copies(self) -> list[tuple[str | None, list[str]]]:
        """The stage copied from (None: the build context) and the sources."""
        found: list[tuple[str | None, list[str]]] = []
        for words in map(shlex.split, self.all("COPY")):
            origin = next((word[7:] for word in words if word.startswith("--from=")), None)
            found.append((origin, [word for word in words if not word.startswith("--")][:-1]))
        return found


def stages(name: str) -> tuple[dict[str, str], list[Stage]]:
    """Global build arguments, and stages with ${ARGUMENT} filled in."""
    text = (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    found: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, words = line.partition(" ")
        words = words.strip()
        if instruction == "ARG" and not found:
            arguments.update([words.split("=", 1)])
        elif instruction == "FROM":
            base, _, stage = re.sub(r"\$\{(\w+)\}", lambda use: arguments[use[1]], words).partition(" AS ")
            found.append(Stage(base, stage))
        else:
            found[-1].instructions.append((instruction, words))
    return arguments, found


def extras(name: str) -> set[str]:
    [install] = [run for run in stages(name)[1][0].all("RUN") if "pip install" in run]
    [wanted] = re.findall(r'"\.\[([\w,]+)\]"', install)
    return set(wanted.split(","))


def taken_out(name: str) -> set[str]:
    [install] = [run for run in stages(name)[1][0].all("RUN") if "pip install" in run]
    [removed] = re.findall(r"pip uninstall --yes ([\w -]+?) &&", install)
    return set(removed.split())


def closure(extra: str) -> set[str]:
    """Names of the distributions that ``perseus-k8s[extra]`` brings."""
    optional = PROJECT["project"]["optional-dependencies"]
    waiting = [Requirement(text) for text in optional[extra]]
    found: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name == PROJECT["project"]["name"]:
            waiting += [Requirement(text) for inner in wanted.extras for text in optional[inner]]
        elif name not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            environments = [{"extra": inner} for inner in (wanted.extras or {""})]
            waiting += [r for r in needs if r.marker is None or any(map(r.marker.evaluate, environments))]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_copied_exists(name: str) -> None:
    seen: set[str] = set()
    for stage in stages(name)[1]:
        for origin, sources in stage.copies():
            assert origin is None or origin in seen, f"--from={origin} is no earlier stage"
            for source in sources if origin is None else ():
                assert (ROOT / source).exists(), source
        seen.add(stage.name)


@pytest.mark.parametrize("name", NAMES)
def test_every_room_of_the_wheel_is_copied_and_not_ignored(name: str) -> None:
    copied = {source for origin, sources in stages(name)[1][0].copies() if origin is None for source in sources}
    rooms = {Path(package).parts[0] for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    said = PROJECT["project"]
    assert copied >= rooms | {"pyproject.toml", said["readme"], *said["license-files"]}
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert taken == copied


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_an_entry_point_and_holds_no_more_than_that_needs(name: str) -> None:
    final = stages(name)[1][-1]
    [entry_point] = final.all("ENTRYPOINT")
    assert entry_point == f'["perseus-{name}"]'
    assert f"perseus-{name}" in PROJECT["project"]["scripts"]
    assert extras(name) == {name}
    assert VALUES[name]["image"]["repository"] == f"perseus-{name}"


def test_the_agent_image_is_small() -> None:
    assert closure("agent") == {"grpcio", "typing-extensions", "protobuf", "nvidia-ml-py", "prometheus-client"}
    assert {"ortools", "kopf", "kubernetes"} <= closure("operator")


_WITHOUT = """
import sys
from importlib.machinery import PathFinder
absent = set(sys.argv[1].split(","))
class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
for module in sys.argv[2].split(","):
    __import__(module)
"""


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("agent", "perseus_agent.__main__,perseus_agent.server,perseus_agent.devices.nvml"),
        ("agent", "perseus_sim.gpu,perseus_sim.device_plugin"),  # the chart's simulated GPUs
        ("operator", "perseus_operator.__main__,perseus_operator.solving,perseus_solver.frontier,perseus_solver.cli"),
        ("operator", "kubernetes.client,kubernetes.config,perseus_sim.model"),  # the chart's own test
    ],
)
def test_what_is_run_is_installed(name: str, modules: str) -> None:
    inside = closure(name) - taken_out(name) | {PROJECT["project"]["name"]}
    owners = {
        top: {re.sub(r"[-_.]+", "-", owner).lower() for owner in names}
        for top, names in metadata.packages_distributions().items()
    }
    absent = sorted(top for top, names in owners.items() if not names & inside)
    assert "pytest" in absent
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT, ",".join(absent), modules], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_one_version_by_argument(name: str) -> None:
    arguments, found = stages(name)
    assert list(arguments) == ["BASE"]
    assert {stage.base for stage in found} == {arguments["BASE"]}
    tag = arguments["BASE"].partition(":")[2]
    assert re.match(r"\d+\.\d+\.\d+", tag), "a version, not a moving tag"
    minor = ".".join(tag.split(".")[:2])
    assert f"Programming Language :: Python :: {minor}" in PROJECT["project"]["classifiers"]


def test_who_runs_in_it_and_where_its_health_is_asked() -> None:
    template = (ROOT / "charts" / "perseus" / "templates" / "operator-deployment.yaml").read_text(encoding="utf-8")
    chart_user = re.findall(r"runAsUser: (\d+)", template)
    [user] = stages("operator")[1][-1].all("USER")
    assert user == f"{chart_user[0]}:{chart_user[0]}"
    assert int(chart_user[0]) > 0
    assert stages("agent")[1][-1].all("USER") == ["0:0"]
    for name, port, exposed in (
        ("operator", keys.DEFAULT_OPERATOR_METRICS_PORT, [keys.DEFAULT_OPERATOR_METRICS_PORT]),
        ("agent", keys.DEFAULT_AGENT_METRICS_PORT, [keys.DEFAULT_GRPC_PORT, keys.DEFAULT_AGENT_METRICS_PORT]),
    ):
        final = stages(name)[1][-1]
        assert f"http://127.0.0.1:{port}/healthz" in final.all("HEALTHCHECK")[0]
        assert final.all("EXPOSE") == [" ".join(map(str, exposed))]


def test_the_operator_has_a_name_although_its_user_has_none() -> None:
    # kopf calls getpass.getuser() at its start, which without a name in the environment asks the password file.
    [assignments] = stages("operator")[1][-1].all("ENV")
    environment = dict(word.split("=", 1) for word in shlex.split(assignments))
    code = "import getpass, os; os.getuid = lambda: 4_000_000_000; print(getpass.getuser())"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "perseus", ran.stderr


def test_the_build_script_parses_and_refuses_latest() -> None:
    script = IMAGES / "build.sh"
    assert script.stat().st_mode & 0o111
    refused = subprocess.run(
        ["bash", str(script)],
        env={"TAG": "latest", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "TAG=latest is refused" in refused.stderr


def test_the_bill_names_what_is_installed() -> None:
    import json

    said = subprocess.run(
        [sys.executable, str(IMAGES / "sbom.py"), "perseus-agent"], capture_output=True, text=True, check=True
    )
    bill = json.loads(said.stdout)
    assert bill["metadata"]["component"]["version"] == PROJECT["project"]["version"]
    named = {component["name"]: component["version"] for component in bill["components"]}
    assert named["grpcio"] == metadata.version("grpcio")
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"])


def test_versions_agree() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "perseus" / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == PROJECT["project"]["version"]
