"""Signatures and attestations by cosign, with a key in a file: nothing is sent to a public transparency log."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from release_build.commands import ReleaseFailed, run

_QUIET: Final = ("--use-signing-config=false", "--tlog-upload=false", "--yes")
_LOCAL: Final = ("--allow-http-registry", "--allow-insecure-registry")
_NO_LOG: Final = "--insecure-ignore-tlog=true"


@dataclass(frozen=True)
class Cosign:
    """The cosign program, with the release's key.

    Args:
        binary: of cosign.
        key: private key, encrypted with COSIGN_PASSWORD; None: only verify.
        public: the key that verifies.
    """

    binary: Path
    key: Path | None
    public: Path

    def sign(self, reference: str) -> None:
        """Sign what a digest names in the local registry; of an index also every image.

        Args:
            reference: ``HOST/REPOSITORY@DIGEST``.

        Raises:
            ReleaseFailed: cosign refused.
        """
        run(self.binary, "sign", "--key", self._key, *_QUIET, *_LOCAL, "--recursive", reference, more=_password())

    def attest(self, reference: str, kind: str, predicate: Path) -> None:
        """Attach a signed statement to what a digest names in the local registry.

        Args:
            reference: ``HOST/REPOSITORY@DIGEST``.
            kind: of the statement, as cosign calls it: ``cyclonedx``, ``slsaprovenance1``.
            predicate: file with the statement, without its subject.

        Raises:
            ReleaseFailed: cosign refused.
        """
        options: list[str | Path] = ["--key", self._key, *_QUIET, *_LOCAL, "--type", kind, "--predicate", predicate]
        run(self.binary, "attest", *options, reference, more=_password())

    def sign_file(self, file: Path, bundle: Path) -> None:
        """Sign a file; write the signature beside it.

        Raises:
            ReleaseFailed: cosign refused.
        """
        run(self.binary, "sign-blob", "--key", self._key, *_QUIET, "--bundle", bundle, file, more=_password())

    def verify(self, reference: str) -> None:
        """Verify the signature of an image, an index or a chart.

        Raises:
            ReleaseFailed: it has none of this key.
        """
        run(self.binary, "verify", "--key", self.public, _NO_LOG, *_LOCAL, reference)

    def verify_attestation(self, reference: str, kind: str) -> str:
        """Verify a statement and return it, as cosign prints it: one JSON envelope a line.

        Raises:
            ReleaseFailed: there is none of this kind and key.
        """
        options: list[str | Path] = ["--key", self.public, _NO_LOG, *_LOCAL, "--type", kind]
        return run(self.binary, "verify-attestation", *options, reference)

    def verify_file(self, file: Path, bundle: Path) -> None:
        """Verify the signature of a file.

        Raises:
            ReleaseFailed: it is not of this key, or the file is another.
        """
        run(self.binary, "verify-blob", "--key", self.public, _NO_LOG, "--bundle", bundle, file)

    @property
    def _key(self) -> Path:
        if self.key is None:
            raise ReleaseFailed("there is no private key to sign with")
        return self.key


def make_key(binary: Path, folder: Path) -> None:
    """Make a pair of keys, ``cosign.key`` and ``cosign.pub``.

    Args:
        binary: of cosign.
        folder: to write them into; nobody else may read it.

    Raises:
        ReleaseFailed: cosign refused.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    run(binary, "generate-key-pair", cwd=folder, more=_password())


def public_key(binary: Path, key: Path) -> str:
    """Return the public key of a private one, as PEM.

    Raises:
        ReleaseFailed: COSIGN_PASSWORD is not its password.
    """
    return run(binary, "public-key", "--key", key, more=_password())


def _password() -> dict[str, str]:
    """Return an environment in which cosign asks nobody: without COSIGN_PASSWORD the key has none."""
    return {"COSIGN_PASSWORD": os.environ.get("COSIGN_PASSWORD", "")}
