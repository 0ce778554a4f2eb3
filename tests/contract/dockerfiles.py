"""The Dockerfiles as data: stages, what they copy and run, and what is installed in each image without building it."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
NAMES = ["operator", "solver", "agent", "bench", "gpu-sim", "trainer"]
PROGRAMS = ["operator", "solver", "agent", "bench"]
EXAMPLE = "steps-example"
EVERY = [*NAMES, EXAMPLE]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((ROOT / "charts" / "perseus" / "values.yaml").read_text(encoding="utf-8"))


def script(name: str) -> ModuleType:
    """Import a program from the folder of the images, which is no package."""
    specification = importlib.util.spec_from_file_location(f"images_{name}", IMAGES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module


build, requirements = script("build"), script("requirements")
builder = sys.modules["image_build.builder"]

FOREIGN = next(f"linux/{each}" for each in ("amd64", "arm64") if each != build.HERE)


@dataclass
class Stage:
    base: str
    name: str
    platform: str = ""
    """On which it runs; empty: not said."""
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
    """Return the global build arguments, and the stages with every ${ARGUMENT} replaced."""
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
            platform = re.match(r"--platform=(\S+) ", words)
            words = words[platform.end() :] if platform else words
            base, _, stage = re.sub(r"\$\{(\w+)\}", lambda use: arguments[use[1]], words).partition(" AS ")
            inherited = next((each.platform for each in found if each.name == base), "")
            found.append(Stage(base, stage, platform[1] if platform else inherited))
        else:
            found[-1].instructions.append((instruction, words))
    return arguments, found


def stage(name: str, called: str) -> Stage:
    [found] = [stage for stage in stages(name)[1] if stage.name == called]
    return found


def installed(name: str) -> set[str]:
    """Return the names of the distributions in an image, without the project's own."""
    [install] = [run for run in stage(name, "needs").all("RUN") if "pip install" in run]
    arguments = re.findall(r"requirements\.py ([\w -]+) >", install)[0].split()
    wanted = {name for word in arguments for text in requirements.wanted_by(PROJECT, word) for name in needs(text)}
    [removed] = re.findall(r"pip uninstall --yes ([\w -]+?)(?: &&|$)", stage(name, "slim").all("RUN")[0].strip())
    return wanted - set(removed.split())


def rooms(name: str) -> set[str]:
    """Return the project's packages in an image."""
    every = {Path(package).name for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    [removed] = re.findall(r"cd /opt/app && rm -r ([\w ]+?)(?: +&&|$)", stage(name, "build").all("RUN")[0])
    assert set(removed.split()) - {"bin"} <= every
    return every - set(removed.split())


def needs(distribution: str) -> set[str]:
    """Return a distribution and everything that it requires."""
    found, waiting = set(), [Requirement(distribution)]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name not in found:
            found.add(name)
            environments = [{"extra": inner} for inner in (wanted.extras or {""})]
            more = map(Requirement, metadata.requires(name) or ())
            waiting += [r for r in more if r.marker is None or any(map(r.marker.evaluate, environments))]
    return found


def extra_of(program: str) -> str:
    """Return the extra of the package that a program needs; ``solver`` and ``bench`` are something else."""
    return {"solver": "service", "bench": "agent"}.get(program, program)


def closure(program: str) -> set[str]:
    """Return the names of the distributions that the extra of a program requires."""
    return {name for text in requirements.requirements(PROJECT["project"], extra_of(program)) for name in needs(text)}


def modules_taken_out(name: str) -> set[str]:
    """Return the modules that the Dockerfile removes from installed packages."""
    [run] = stage(name, "slim").all("RUN")
    gone = set()
    if listed := re.search(r"cd ortools && rm -r ([\w ]+?) +&&", run):
        gone |= {f"ortools.{part}" for part in listed[1].split()}
    if listed := re.search(r"rm -r (numpy/[\w/ ]+?) +&&", run):
        gone |= {part.replace("/", ".") for part in listed[1].split()}
    if "find kubernetes " in run:
        gone |= {f"kubernetes.{part}" for part in ("client", "config", "dynamic", "stream", "utils", "watch")}
    return gone
