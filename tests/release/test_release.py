"""A release as users get it: whole and signed, images that each platform can run, a chart in a registry.

The release is the one of ``make release``; the tests change copies of it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import release as program
from image_build import elf
from release_build import images, provenance
from release_build.chart import FOLDER, Helm, package, push
from release_build.commands import ReleaseFailed, run
from release_build.registry import Registry
from release_build.signing import Cosign, make_key
from release_build.sources import export

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]


def references(release: Path) -> dict[str, Any]:
    return dict(json.loads((release / "references.json").read_text()))


@pytest.fixture
def other_key(tools: program.Tools, tmp_path: Path) -> Cosign:
    """Keys of a stranger."""
    make_key(tools.cosign, tmp_path / "stranger")
    return Cosign(tools.cosign, tmp_path / "stranger" / "cosign.key", tmp_path / "stranger" / "cosign.pub")


def test_a_release_is_whole_and_signed_with_its_key(release: Path, tools: program.Tools) -> None:
    program.verify(release, tools, Cosign(tools.cosign, None, release / program.PUBLIC))


def test_the_private_key_is_not_in_the_release(release: Path) -> None:
    for path in release.rglob("*"):
        if path.is_file() and program.REGISTRY not in path.parts:
            assert b"PRIVATE KEY" not in path.read_bytes(), path


def test_another_key_verifies_nothing(
    release: Path, tools: program.Tools, registry: Registry, other_key: Cosign
) -> None:
    stranger = Cosign(tools.cosign, None, other_key.public)
    with pytest.raises(ReleaseFailed, match="verify-blob"):
        stranger.verify_file(release / program.SUMS, release / program.SIGNATURE)
    for repository, named in references(release).items():
        for digest in (named["digest"], *named["platforms"].values()):
            with pytest.raises(ReleaseFailed, match="`cosign verify "):
                stranger.verify(f"{registry.host}/{repository}@{digest}")
        with pytest.raises(ReleaseFailed, match="`cosign verify-attestation "):
            stranger.verify_attestation(f"{registry.host}/{repository}@{named['digest']}", "slsaprovenance1")


def _change(folder: Path) -> str:
    [wheel] = (folder / "simple" / "perseus-k8s").glob("*none-any.whl")
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    return f"{wheel.name} is not the file that was signed"


def _remove(folder: Path) -> str:
    (folder / "images.yaml").unlink()
    return "images.yaml is not the file that was signed"


def _add(folder: Path) -> str:
    (folder / "simple" / "perseus-k8s" / "perseus_k8s-9-py3-none-any.whl").write_bytes(b"")
    return "perseus_k8s-9-py3-none-any.whl is in no sum"


def _sum_again(folder: Path) -> str:
    _change(folder)
    program._sums(folder)
    return "`cosign verify-blob"


def _link(file: str, copy: str) -> None:
    try:
        os.link(file, copy)
    except OSError:  # another file system
        shutil.copy(file, copy)


STORAGE = Path("registry", "docker", "registry", "v2")


def _lose_an_image(folder: Path) -> str:
    shutil.rmtree(folder / STORAGE / "repositories" / "perseus" / "perseus-agent")
    return "the local registry has no perseus/perseus-agent/manifests/"


def _change_a_layer(folder: Path) -> str:
    largest = max((folder / STORAGE / "blobs").rglob("data"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.unlink()  # it is a link
    largest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return "the local registry has something else than perseus/perseus-operator@"


def _move_a_tag(folder: Path) -> str:
    """The tag names the image of one platform, which was signed too."""
    repository = "perseus/perseus-agent"
    [tag] = (folder / STORAGE / "repositories" / repository / "_manifests" / "tags").glob("[0-9]*")
    link = tag / "current" / "link"
    link.unlink()
    link.write_text(references(folder)[repository]["platforms"]["linux/arm64"])
    return f"{repository}:{tag.name} is not sha256:"


@pytest.mark.parametrize(
    "harm",
    [_change, _remove, _add, _sum_again, _lose_an_image, _change_a_layer, _move_a_tag],
    ids=lambda harm: harm.__name__,
)
def test_a_release_that_was_changed_is_refused(
    release: Path, tools: program.Tools, harm: Callable[[Path], str], tmp_path: Path
) -> None:
    copy = tmp_path / "release"
    shutil.copytree(release, copy, ignore=shutil.ignore_patterns("registry"))
    shutil.copytree(release / "registry", copy / "registry", copy_function=_link)  # it is large
    said = harm(copy)
    with pytest.raises(ReleaseFailed) as refused:
        program.verify(copy, tools, Cosign(tools.cosign, None, release / program.PUBLIC))
    assert said in str(refused.value)


def test_every_file_of_an_image_is_for_the_images_platform(release: Path, registry: Registry) -> None:
    found: dict[str, int] = {}
    checked = set()
    for repository, named in references(release).items():
        for platform, digest in named["platforms"].items():
            architecture = platform.partition("/")[2]
            _, manifest = registry.manifest(repository, digest)
            config = json.loads(registry.blob(repository, manifest["config"]["digest"]))
            assert config["architecture"] == architecture
            for layer in manifest["layers"]:
                if (architecture, layer["digest"]) in checked:
                    continue
                checked.add((architecture, layer["digest"]))
                with tarfile.open(fileobj=io.BytesIO(registry.blob(repository, layer["digest"]))) as tar:
                    for entry in tar:
                        file = tar.extractfile(entry) if entry.isreg() else None
                        parsed = elf.parse(file.read()) if file else None
                        if parsed:
                            assert parsed.machine == elf.MACHINES[architecture], f"{repository} {platform} {entry.name}"
                            found[architecture] = found.get(architecture, 0) + 1
    assert min(found["amd64"], found["arm64"]) > 500


def test_each_image_has_a_bill_and_a_provenance_that_name_it(
    release: Path, registry: Registry, tools: program.Tools
) -> None:
    cosign = Cosign(tools.cosign, None, release / program.PUBLIC)
    said = json.loads((release / "provenance.json").read_text())
    commit = said["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
    assert run("git", "cat-file", "-t", commit, cwd=ROOT).strip() == "commit"
    for name in images.NAMES:
        bills = sorted((release / "sbom").glob(f"perseus-{name}-*.cdx.json"))
        assert len(bills) == len(images.PLATFORMS)
        listed = [json.loads(bill.read_text()) for bill in bills]
        assert listed[0] == listed[1], "the same packages for both platforms"
        assert listed[0]["metadata"]["component"]["name"] == f"perseus-{name}"
        assert len(listed[0]["components"]) > 1
        reference = f"{registry.host}/perseus/perseus-{name}@{references(release)[f'perseus/perseus-{name}']['digest']}"
        assert json.loads(cosign.verify_attestation(reference, "slsaprovenance1").splitlines()[0])


def test_helm_takes_the_chart_from_the_registry(
    release: Path, registry: Registry, tools: program.Tools, tmp_path: Path
) -> None:
    helm, version = Helm(tools.helm, tmp_path / "helm"), _version(release)
    reference = f"oci://{registry.host}/{FOLDER}/perseus"
    helm("pull", reference, "--version", version, "--plain-http", "--destination", tmp_path)
    [packed] = (release / "chart").iterdir()
    assert (tmp_path / packed.name).read_bytes() == packed.read_bytes()
    shown = helm(
        "template", "perseus", reference, "--version", version, "--plain-http",
        "--set", f"image.registry={registry.host}/perseus", "--values", release / "images.yaml",
        "--set", "simulatedGpus.enabled=true,solver.enabled=true,acceptance.enabled=true",
    )  # fmt: skip
    used = set()
    for document in filter(None, yaml.safe_load_all(shown)):
        spec = document.get("spec", {})
        pod = spec.get("template", {}).get("spec", spec)
        used |= {container["image"] for container in (*pod.get("containers", ()), *pod.get("initContainers", ()))}
    named = references(release)
    assert used == {
        f"{registry.host}/perseus/perseus-{name}@{named[f'perseus/perseus-{name}']['digest']}"
        for name in ("operator", "solver", "agent", "bench", "gpu-sim")
    }


def test_the_same_chart_is_pushed_under_the_same_digest(release: Path, tools: program.Tools, tmp_path: Path) -> None:
    helm, digests = Helm(tools.helm, tmp_path / "helm"), []
    for name in ("first", "again"):
        sources = export(ROOT, "HEAD", tmp_path / name)
        archive = package(
            helm, sources.folder / "charts" / "perseus", tmp_path / f"{name}-chart", "0.1.0", 1_700_000_000
        )
        with program.serving(tools.registry, tmp_path / f"{name}-registry") as registry:
            digests.append(push(helm, registry, archive, "0.1.0")[1])
    assert digests[0] == digests[1]


def test_pip_installs_the_release_from_its_index(release: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--index-url", (release / "simple").as_uri(), "perseus-k8s")
    script = "from importlib.metadata import version; import perseus_client; print(version('perseus-k8s'))"
    assert run(python, "-I", "-c", script).strip() == _version(release)


def test_a_release_is_copied_to_another_registry_with_all_that_is_signed(
    release: Path, tools: program.Tools, tmp_path: Path
) -> None:
    cosign = Cosign(tools.cosign, None, release / program.PUBLIC)
    with program.serving(tools.registry, tmp_path / "other") as other:
        copied = program.copy(release, f"{other.host}/team", tools)
        assert len(copied) == len(images.NAMES) + 1
        assert f"{other.host}/team/charts/perseus:{_version(release)}" in {name.partition("@")[0] for name in copied}
        for name in copied:
            cosign.verify(name)
            cosign.verify_attestation(name, "slsaprovenance1")
        digest, index = other.manifest("team/perseus-agent", _version(release))
        assert digest == references(release)["perseus/perseus-agent"]["digest"]
        for entry in index["manifests"]:
            cosign.verify_attestation(f"{other.host}/team/perseus-agent@{entry['digest']}", "cyclonedx")


PINNED = "python:3.11.14-slim-bookworm@sha256:" + 64 * "a"


@pytest.mark.parametrize("base", ["local", "python:3.11.14-slim-bookworm"])
def test_a_release_whose_bases_no_digest_names_is_copied_to_no_other_machine(
    base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = provenance.predicate(ROOT, "https://perseus.example/", "1", 40 * "a", {"BASE": base, "COMPILER": PINNED})
    (tmp_path / "provenance.json").write_text(json.dumps(said))
    monkeypatch.setattr(program, "verify", lambda *_: None)
    none = program.Tools(*4 * (tmp_path / "none",))
    with pytest.raises(ReleaseFailed, match="is for a trial"):
        program.copy(tmp_path, "registry.example/team", none)


def test_a_commit_that_is_not_there_leaves_the_release_of_before(
    release: Path, tools: program.Tools, tmp_path: Path
) -> None:
    before = tmp_path / "out" / "release"
    before.mkdir(parents=True)
    (before / "SHA256SUMS").write_text("of before\n")
    make_key(tools.cosign, tmp_path / "key")
    command = [sys.executable, str(ROOT / "deploy" / "release" / "release.py"), "build", "--output", str(before)]
    command += ["--key", str(tmp_path / "key" / "cosign.key"), "--revision", "no-such-commit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("release.py: `git rev-parse ")
    assert [path.name for path in before.parent.iterdir()] == ["release"]
    assert (before / "SHA256SUMS").read_text() == "of before\n"


def _version(release: Path) -> str:
    [archive] = (release / "chart").iterdir()
    return archive.stem.removeprefix("perseus-")
