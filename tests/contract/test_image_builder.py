"""The rules of deploy/images/build.py: what it refuses, what it forgets, how it names what it has built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.contract.dockerfiles import EXAMPLE, FOREIGN, IMAGES, build, builder


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"TAG": "latest"}, [], "TAG=latest is refused"),
        (
            {"PLATFORMS": "linux/arm64,linux/s390x"},
            [],
            "PLATFORMS: unknown platform 'linux/s390x': known are linux/amd64, linux/arm64",
        ),
        (
            {"PLATFORMS": "linux/amd64,linux/arm64"},
            ["--archive=x"],
            "--archive: an archive is for the nodes of one platform: name one in PLATFORMS",
        ),
        (
            {"PLATFORMS": FOREIGN},
            [EXAMPLE],
            f"{EXAMPLE} is built for linux/{build.HERE} alone: its build runs what it installs",
        ),
        (
            {},
            ["agents"],
            "unknown image 'agents': known are agent, bench, operator, solver, gpu-sim, trainer, steps-example",
        ),
        ({}, ["agent"], "no builder: docker has no engine here, and neither podman nor buildah is installed"),
    ],
)
def test_the_builder_refuses_in_one_sentence(
    environment: dict[str, str], arguments: list[str], message: str, tmp_path: Path
) -> None:
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), **environment}
    command = [sys.executable, str(IMAGES / "build.py"), *arguments]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == f"build.py: {message}" + refused.stderr.partition(message)[2]
    assert len(refused.stderr.splitlines()) == 1


def test_only_dated_builds_and_only_our_own_store_forget_their_layers(tmp_path: Path) -> None:
    record = tmp_path / "record"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$@" >> {record}\n')
    program.chmod(0o755)
    for name, options in (("podman", ["--no-cache"]), ("buildah", ["--format=docker"])):
        builder.Builder(name, [str(program)], options).forget_layers()
        assert not record.exists(), "what others stored, and what the next build uses, stays"
    builder.Builder("buildah", [str(program), "--root", "ours"], ["--no-cache"]).forget_layers()
    assert record.read_text() == "--root ours rmi --prune\n"


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("perseus-agent:1", "docker.io/library/perseus-agent:1"),
        ("team/perseus-agent:1", "docker.io/team/perseus-agent:1"),
        ("registry.example/team/perseus-agent:1", "registry.example/team/perseus-agent:1"),
        ("localhost/perseus-agent:1", "localhost/perseus-agent:1"),
    ],
)
def test_full_names_are_those_that_the_kubelet_requests(image: str, name: str) -> None:
    assert builder.full_name(image) == name


@pytest.mark.parametrize(
    ("asked", "files", "message"),
    [
        # buildah found another image under the name of the one that it had built.
        (("arm64",), {"amd64": set()}, "agent: it is for amd64, not arm64"),
        (
            ("amd64", "arm64"),
            {"amd64": {"a.py"}, "arm64": {"a.py", "b.py"}},
            "agent: b.py is not in both of amd64 and arm64",
        ),
    ],
)
def test_images_that_are_not_what_was_asked_for_are_in_no_archive(
    asked: tuple[str, ...],
    files: dict[str, set[str]],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter([build.contents.Image("docker.io/x/perseus-agent:1", architecture, (), ()) for architecture in files])
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setattr(build.contents, "images_of", lambda _: [next(found)])
    monkeypatch.setattr(build.contents, "names_above_the_base", lambda image: files[image.architecture])
    built = {architecture: {"stored": "perseus-agent:1"} for architecture in asked}
    archive = tmp_path / "images.tar" if len(asked) == 1 else None
    with pytest.raises(build.BuildFailed, match=message):
        build.check(SimpleNamespace(lay_out=lambda images, folder: None), built, archive)
    assert not (tmp_path / "images.tar").exists()
