"""What build.py checks of images that it has built: sizes, and whether their platform can run every file in them."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from image_build import contents, elf

X86_64, AARCH64 = elf.MACHINES["amd64"], elf.MACHINES["arm64"]


def library(machine: int, *needed: str) -> bytes:
    """An ELF file of 64 bits with a loaded segment and a dynamic one, which names the libraries that it needs."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    at, base = 64 + 2 * 56, 0x1000  # the loader puts the file at this address
    offsets = [strings.index(name.encode() + b"\0") for name in needed]
    entries = [(5, base + at), *((1, offset) for offset in offsets), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    length = at + len(strings) + len(dynamic)
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    )
    segments = struct.pack("<IIQQQQQQ", 1, 4, 0, base, base, length, length, 4096)
    at_dynamic = at + len(strings)
    segments += struct.pack("<IIQQQQQQ", 2, 4, at_dynamic, base + at_dynamic, 0, len(dynamic), len(dynamic), 8)
    return head + segments + strings + dynamic


def layer(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


BASE = {"lib/libc.so.6": library(AARCH64), "lib/ld-linux-aarch64.so.1": library(AARCH64)}
GOOD = {"opt/perseus/lib/module.so": library(AARCH64, "libc.so.6"), "opt/perseus/lib/module.py": b"pass\n"}


def image(folder: Path, above: Mapping[str, bytes], architecture: str = "arm64") -> contents.Image:
    """The agent's image with these files in its first layer above the base."""

    def blob(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (folder / "blobs" / "sha256" / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    history = [{"created_by": "/bin/sh -c #(nop) ADD base.tar in /"}, {"created_by": "ENV", "empty_layer": True}]
    history += [{"created_by": f"COPY {name}"} for name in ("/opt/perseus", "/opt/app", "LICENSE")]
    layers = [layer(BASE), layer(above), layer({"opt/app/a.py": b""}), layer({"licenses/LICENSE": b""})]
    config = blob(json.dumps({"history": history, "architecture": architecture}).encode())
    manifest = blob(json.dumps({"config": config, "layers": list(map(blob, layers))}).encode())
    entry = {**manifest, "annotations": {contents.NAME: "docker.io/x/perseus-agent:1"}}
    (folder / "index.json").write_text(json.dumps({"manifests": [entry]}))
    [found] = contents.images_of(folder)
    return found


def test_an_image_that_its_platform_can_run_has_no_problem(tmp_path: Path) -> None:
    found = image(tmp_path, GOOD)
    assert (found.name, found.architecture, len(found.above), len(found.blobs)) == ("agent", "arm64", 3, 4)
    assert contents.problems_of(found) == []


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("opt/x.so", library(X86_64), "agent: opt/x.so is not for arm64 (machine 62)"),
        ("opt/x.so", library(AARCH64, "libm.so.6"), "agent: opt/x.so needs libm.so.6, which the image lacks"),
        ("opt/x.so", library(AARCH64)[:70], "agent: opt/x.so is an ELF file that is cut off"),
        ("opt/x", b"\x7fELF\x01\x01" + bytes(60), "agent: opt/x is an ELF file, but not of 64 bits and little-endian"),
    ],
)
def test_what_the_platform_cannot_run_is_named(path: str, content: bytes, problem: str, tmp_path: Path) -> None:
    assert contents.problems_of(image(tmp_path, {**GOOD, path: content})) == [problem]


def test_a_library_may_be_in_any_layer_and_be_a_link(tmp_path: Path) -> None:
    more = {"opt/own.libs/libgomp.so.1": library(AARCH64), "opt/x.so": library(AARCH64, "libgomp.so.1", "libc.so.6")}
    assert contents.problems_of(image(tmp_path, {**GOOD, **more})) == []


def test_layers_above_the_base_are_found_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = image(tmp_path, {"opt/large": b"o" * 3_500_000})
    assert "docker.io/x/perseus-agent:1, arm64: 3.5 MB above the base, 60 MB allowed" in contents.report(found)
    assert contents.problems_of(found) == []
    monkeypatch.setitem(contents.BOUNDS_MB, "agent", 3)
    assert contents.problems_of(found) == ["agent: 3.5 MB above the base, 3 MB allowed"]


def test_every_image_has_a_bound() -> None:
    names = {path.name.removesuffix(".Dockerfile") for path in contents.FOLDER.glob("*.Dockerfile")}
    assert set(contents.BOUNDS_MB) == names
    assert (contents.BOUNDS_MB["agent"], contents.BOUNDS_MB["operator"]) == (60, 260)
    assert [contents.instructions(name) for name in ("operator", "agent", "gpu-sim", "trainer")] == [3, 3, 4, 3]


def test_files_of_two_platforms_are_compared_without_the_names_of_their_machines(tmp_path: Path) -> None:
    def names(machine: int, word: str, more: Mapping[str, bytes]) -> set[str]:
        files = {f"opt/m.cpython-311-{word}-linux-gnu.so": library(machine), f"opt/n.libs/l-{word[:2]}.so": b"", **more}
        (tmp_path / word).mkdir(exist_ok=True)
        return contents.names_above_the_base(image(tmp_path / word, files))

    assert names(AARCH64, "aarch64", {}) == names(X86_64, "x86_64", {})
    assert "opt/m.cpython-311-MACHINE-linux-gnu.so" in names(AARCH64, "aarch64", {})
    assert names(AARCH64, "aarch64", {"opt/o.py": b""}) ^ names(X86_64, "x86_64", {}) == {"opt/o.py"}


def test_the_head_of_a_real_program_is_read() -> None:
    if sys.platform != "linux":
        pytest.skip("no ELF files here")
    with open("/proc/self/exe", "rb") as file:
        found = elf.parse(file.read())
    assert found is not None
    assert found.machine in elf.MACHINES.values()
    assert any(name.startswith("libc.so") for name in found.needed)
    assert elf.parse(b"#!/bin/sh\n") is None
