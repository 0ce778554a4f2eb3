"""The parser of the project's command lines: errors take one line and say what was probably meant, options are spelt in
full, and the help of a command ends with examples.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn

BAD_INPUT: Final = 2
"""Exit code."""
_CHOICE: Final = re.compile(r"invalid choice: '(?P<given>.*?)' \(choose from (?P<choices>.*)\)")


class CommandParser(argparse.ArgumentParser):
    """A parser, also of subcommands; its description and epilog keep their lines."""

    def __init__(self, **keywords: Any) -> None:
        """Keywords as of `argparse.ArgumentParser`."""
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**{"allow_abbrev": False, **keywords})

    def error(self, message: str) -> NoReturn:
        """Leave with one line on standard error and exit code `BAD_INPUT`."""
        choice = _CHOICE.search(message)
        if choice:
            choices = re.findall(r"'(.*?)'", choice["choices"]) or choice["choices"].split(", ")
            message += _meant(choice["given"], choices)
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `argparse` does; what is left over is an error here, where this command's options are known."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"{rest[0]} is not an option of it" + _meant(rest[0].partition("=")[0], options))
        return options, rest


def _meant(given: str, choices: Sequence[str]) -> str:
    near = get_close_matches(given, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""
