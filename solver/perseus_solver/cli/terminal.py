"""Terminals that cannot show every character: ASCII takes the place of what they lack, instead of a traceback."""

from __future__ import annotations

import codecs
import io
from typing import TextIO

_ASCII = {
    "…": "...", "×": "x", "≤": "<=", "≥": ">=", "–": "-", "−": "-", "’": "'", "Σ": "sum", "·": "*", "█": "#", "░": "."
}  # fmt: skip
_HANDLER = "perseus-ascii"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace the characters that could not be encoded, as a handler of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error(_HANDLER, _in_ascii)


def replace_unprintable(stream: TextIO) -> None:
    """Let a stream write ASCII where its encoding lacks a character."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_HANDLER)
