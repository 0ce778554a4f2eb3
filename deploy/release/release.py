"""Make a release in a local folder, with a package index and an OCI registry. Nothing is pushed anywhere else.

usage: release.py build [--output FOLDER] [--revision COMMIT] [--key FILE]
       release.py verify FOLDER [--key FILE]
       release.py serve FOLDER [--port N]
       release.py copy FOLDER REGISTRY

``build`` takes the files of one commit, and makes packages, images for two platforms, the chart, bills of materials,
provenance, notes and signatures. All is checked before the folder appears under its name: a release that failed leaves
the one of before. ``verify`` checks sums, signatures and statements of a release. ``serve`` runs its registry on
loopback, to install from it. ``copy`` copies images and chart, with signatures and statements, to another registry:
what is for a trial only to one on this machine.

Environment:
  BASE, COMPILER, BASE_DATE   images to build on, as of deploy/images/build.py; without them local ones, for a trial
  COSIGN_PASSWORD             of the private key; without it the key has none
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from release_build import chart, images, packages, provenance
from release_build.commands import ReleaseFailed, run
from release_build.registry import serving
from release_build.signing import Cosign, make_key, public_key
from release_build.sources import Sources, export, require_clean

ROOT: Final = Path(__file__).resolve().parents[2]
KEY: Final = ROOT / "out" / "release-key" / "cosign.key"
"""Private key of a trial, which is made where none is given; never in the folder of the release."""
SUMS: Final = "SHA256SUMS"
SIGNATURE: Final = "SHA256SUMS.sigstore.json"
PUBLIC: Final = "cosign.pub"
REFERENCES: Final = "references.json"
"""Digest of each image and of the chart in the registry, by repository."""
REGISTRY: Final = "registry"
"""Storage of the registry; what is in it is named by digests, and is not in the sums."""
INDEX: Final = "simple"


@dataclass(frozen=True)
class Tools:
    """Programs that are built from Go modules, because no package index has them."""

    registry: Path
    cosign: Path
    oras: Path
    helm: Path

    @classmethod
    def built(cls) -> Tools:
        """Build those that are missing.

        Raises:
            ReleaseFailed: Go is not installed, or cannot build one.
        """
        builder = ROOT / "deploy" / "control-plane" / "build.py"
        names = ("registry", "cosign", "oras", "helm")
        folder = Path(run(sys.executable, builder, *names).strip())
        return cls(*(folder / name for name in names))


def build(output: Path, revision: str, key: Path) -> None:
    """Make a release.

    Args:
        output: folder that it becomes; one that is there is replaced at the end.
        revision: commit that is released.
        key: private key of cosign; made if it is the default and not there.

    Raises:
        ReleaseFailed: a part could not be made. Then there is no new folder.
    """
    tools = Tools.built()
    cosign = _cosign(tools, key)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".release-", dir=output.parent) as scratch:
        work, made = Path(scratch), Path(scratch) / "release"
        sources = export(ROOT, revision, work / "source")
        made.mkdir(mode=0o755)
        _say(f"release {sources.version} of commit {sources.commit[:12]}")
        _packages(sources, work, made)
        (made / PUBLIC).write_text(public_key(tools.cosign, key))
        (made / "CHANGES.md").write_text(sources.changes())
        shutil.copytree(sources.folder / "deploy" / "crds", made / "crds")
        said = provenance.predicate(sources.folder, sources.home, sources.version, sources.commit, images.bases())
        (made / "provenance.json").write_text(json.dumps(said, indent=2) + "\n")
        _registry(tools, cosign, sources, work, made)
        _sums(made)
        cosign.sign_file(made / SUMS, made / SIGNATURE)
        verify(made, tools, Cosign(tools.cosign, None, made / PUBLIC))
        _replace(made, output)
    size_mb = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) / 1e6
    _say(f"{os.path.relpath(output)}: {size_mb:.0f} MB, SHA-256 of its sums {_sha256(output / SUMS)}")
    if not images.are_pinned(images.bases()):
        _say("No digest names the bases of the images: this is for a trial. To publish, set BASE, COMPILER, BASE_DATE.")


def verify(folder: Path, tools: Tools, cosign: Cosign) -> None:
    """Check that a release is whole and signed with one key: every file, image, chart and statement.

    Args:
        folder: of the release.
        tools: to check it with.
        cosign: with the public key that is trusted.

    Raises:
        ReleaseFailed: a part is missing, was changed, or has no signature of this key.
    """
    cosign.verify_file(folder / SUMS, folder / SIGNATURE)
    sums: dict[str, str] = {}
    for line in (folder / SUMS).read_text().splitlines():
        digest, name = line.split("  ", 1)
        sums[name] = digest
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise ReleaseFailed(f"{folder / name} is not the file that was signed")
    if extra := {str(path.relative_to(folder)) for path in _summed(folder)} - set(sums):
        raise ReleaseFailed(f"{folder / min(extra)} is in no sum")
    with serving(tools.registry, folder / REGISTRY) as registry:
        for repository, named in json.loads((folder / REFERENCES).read_text()).items():
            if registry.check(repository, named["tag"]) != named["digest"]:
                raise ReleaseFailed(f"{repository}:{named['tag']} is not {named['digest']}, which was signed")
            reference = f"{registry.host}/{repository}@{named['digest']}"
            cosign.verify(reference)
            cosign.verify_attestation(reference, "slsaprovenance1")
            for digest in named["platforms"].values():
                cosign.verify(f"{registry.host}/{repository}@{digest}")
                cosign.verify_attestation(f"{registry.host}/{repository}@{digest}", "cyclonedx")


def serve(folder: Path, port: int, tools: Tools) -> None:
    """Run the registry of a release until it is interrupted, and print what is in it."""
    with serving(tools.registry, folder / REGISTRY, port) as registry:
        for repository, named in json.loads((folder / REFERENCES).read_text()).items():
            print(f"{registry.host}/{repository}:{named['tag']}@{named['digest']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


def copy(folder: Path, registry: str, tools: Tools) -> list[str]:
    """Copy images and chart of a release to another registry, with all that is signed of them.

    Args:
        folder: of the release, which is verified first.
        registry: with a folder, if it has any: ``registry.example/team``.
        tools: to copy with.

    Returns:
        The name of each, with its tag and digest.

    Raises:
        ReleaseFailed: the release is not whole, is for a trial, or the other registry refused it.
    """
    verify(folder, tools, Cosign(tools.cosign, None, folder / PUBLIC))
    local = registry.startswith("127.0.0.1:")
    built_on = json.loads((folder / "provenance.json").read_text())["buildDefinition"]["externalParameters"]
    if not local and not images.are_pinned(built_on):
        raise ReleaseFailed(
            f"{folder} is for a trial: no digest names the bases of its images, and nobody can look them up"
        )
    copied = []
    with serving(tools.registry, folder / REGISTRY) as source:
        for repository, named in json.loads((folder / REFERENCES).read_text()).items():
            target = f"{registry}/{repository.removeprefix(f'{images.PREFIX}/')}:{named['tag']}"
            plain = ["--from-plain-http", *(["--to-plain-http"] if local else [])]
            run(tools.oras, "cp", "--recursive", *plain, f"{source.host}/{repository}@{named['digest']}", target)
            copied.append(f"{target}@{named['digest']}")
    return copied


def _packages(sources: Sources, work: Path, made: Path) -> None:
    started = time.monotonic()
    files = packages.build(sources.folder, work / "packages", sources.epoch_s)
    for file in files:
        _say(f"  {file.stat().st_size / 1e6:6.2f} MB  {file.name}")
    packages.write_index(files, made / INDEX)
    _say(f"packages: {time.monotonic() - started:.0f} s")


def _registry(tools: Tools, cosign: Cosign, sources: Sources, work: Path, made: Path) -> None:
    """Build images and chart into the registry, and sign them there."""
    version, helm = sources.version, chart.Helm(tools.helm, work / "helm")
    references = {}
    with serving(tools.registry, made / REGISTRY) as registry:
        started = time.monotonic()
        images.build(sources.folder, registry, version, sources.epoch_s)
        found = {image.name: image for image in images.published(registry, version)}
        _say(f"images: {time.monotonic() - started:.0f} s")
        started = time.monotonic()
        for image in found.values():
            references[image.repository] = {"tag": version, "digest": image.digest, "platforms": dict(image.platforms)}
            for platform, digest in image.platforms.items():
                bill = made / "sbom" / f"perseus-{image.name}-{platform.replace('/', '-')}.cdx.json"
                bill.parent.mkdir(exist_ok=True)
                bill.write_bytes(images.bill(registry, image, platform))
                cosign.attest(f"{registry.host}/{image.repository}@{digest}", "cyclonedx", bill)
        (made / "images.yaml").write_text(images.values(found))
        archive = chart.package(helm, sources.folder / "charts" / "perseus", made / "chart", version, sources.epoch_s)
        repository, digest = chart.push(helm, registry, archive, version)
        references[repository] = {"tag": version, "digest": digest, "platforms": {}}
        for repository, named in references.items():
            cosign.sign(f"{registry.host}/{repository}@{named['digest']}")
            cosign.attest(
                f"{registry.host}/{repository}@{named['digest']}", "slsaprovenance1", made / "provenance.json"
            )
        _say(f"chart and signatures: {time.monotonic() - started:.0f} s")
    (made / REFERENCES).write_text(json.dumps(references, indent=2) + "\n")


def _cosign(tools: Tools, key: Path) -> Cosign:
    if not key.exists():
        if key != KEY:
            raise ReleaseFailed(f"no key {key}: make one with `cosign generate-key-pair`")
        make_key(tools.cosign, key.parent)
        _say(f"made {key}: for a trial, without a password unless COSIGN_PASSWORD is set")
    return Cosign(tools.cosign, key, key.with_suffix(".pub"))


def _summed(folder: Path) -> list[Path]:
    """Return the files that the sums cover: all but the sums themselves, their signature, and the registry."""
    outside = {folder / SUMS, folder / SIGNATURE}
    files = [path for path in folder.rglob("*") if path.is_file() and path not in outside]
    return sorted(path for path in files if (folder / REGISTRY) not in path.parents)


def _sums(folder: Path) -> None:
    lines = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _summed(folder)]
    (folder / SUMS).write_text("".join(lines))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(made: Path, output: Path) -> None:
    """Give a folder its name; the one of before, which stays beside the sources until then, goes afterwards."""
    before = made.with_name("before")
    if output.exists():
        output.rename(before)
    try:
        made.rename(output)
    except OSError:
        if before.exists():
            before.rename(output)
        raise


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="release.py", description="Make a release in a local folder.", epilog=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="make a release")
    building.add_argument("--output", type=Path, default=ROOT / "out" / "release", help="default: %(default)s")
    building.add_argument("--revision", help="commit to release; default: HEAD, of a tree without changes")
    building.add_argument("--key", type=Path, default=KEY, help="private key of cosign; default: %(default)s")
    verifying = commands.add_parser("verify", help="check sums, signatures and statements")
    verifying.add_argument("folder", type=Path)
    verifying.add_argument("--key", type=Path, help="public key; default: the one in the folder")
    serving_ = commands.add_parser("serve", help="run its registry on loopback until it is interrupted")
    serving_.add_argument("folder", type=Path)
    serving_.add_argument("--port", type=int, default=0, help="default: any that is free")
    copying = commands.add_parser("copy", help="copy images and chart to another registry")
    copying.add_argument("folder", type=Path)
    copying.add_argument("registry", help="such as registry.example/team")
    given = parser.parse_args(arguments)
    match given.command:
        case "build":
            if given.revision is None:
                require_clean(ROOT)
            build(given.output.resolve(), given.revision or "HEAD", given.key.resolve())
        case "verify":
            tools = Tools.built()
            key = given.key or given.folder / PUBLIC
            verify(given.folder, tools, Cosign(tools.cosign, None, key))
            print(f"{given.folder}: whole, and signed with {key}")
        case "copy":
            print("\n".join(copy(given.folder, given.registry, Tools.built())))
        case _:
            serve(given.folder, given.port, Tools.built())


if __name__ == "__main__":
    os.umask(0o022)
    try:
        main()
    except (ReleaseFailed, OSError) as error:
        sys.exit(f"release.py: {error}")
