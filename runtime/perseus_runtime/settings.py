"""Settings of a program: one frozen dataclass from which flags, environment variables and ``--help`` are made.

A program declares its settings once, as fields made by ``setting``: with their effect, their unit, what an empty value
means and why the default is what it is. Everything else follows from the fields, so that a flag, its variable, its help
and the chart's value cannot disagree. Nothing is read here but arguments and environment; whether a file exists is not
checked. Settings are strings, integers, floats and switches, because only those can be written in an environment.

A wrong value raises ``InvalidSetting``, whose message is one line: the flag or variable, and the rule that it breaks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any, ClassVar, Final, TypeVar

from perseus_runtime.addresses import parse_address

LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

_TRUE: Final = {"true", "1"}
_FALSE: Final = {"false", "0", ""}


class InvalidSetting(ValueError):
    """A setting breaks a rule; the message names the flag or variable, and the rule."""


def setting(default: Any, doc: str, *, minimum: float | None = None) -> Any:
    """A field of a settings dataclass.

    Args:
        default: its type is the type of the setting: str, int, float or bool.
        doc: effect, unit, meaning of an empty value and the reason for the default, in full sentences.
        minimum: the smallest number allowed; None: any.
    """
    return field(default=default, metadata={"doc": doc, "minimum": minimum})


def flag_of(name: str) -> str:
    """The flag of a field: ``log_level`` is set by ``--log-level``."""
    return "--" + name.replace("_", "-")


def names_of(text: str) -> tuple[str, ...]:
    """The names in a list separated by commas, without spaces and empty ones."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


class BaseSettings:
    """What the settings of all programs have in common. A subclass is a frozen dataclass; it adds fields, and rules in
    ``check``.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of the subclass
    program: ClassVar[str]
    description: ClassVar[str]
    environment_prefix: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            minimum = each.metadata["minimum"]
            if minimum is not None and getattr(self, each.name) < minimum:
                raise InvalidSetting(f"{flag_of(each.name)}: must be at least {minimum}")
        self.check()

    def check(self) -> None:
        """Check the rules of this program's settings.

        Raises:
            InvalidSetting: a value breaks one.
        """

    def check_not_empty(self, *names: str) -> None:
        """Require values for these fields."""
        for name in names:
            if not getattr(self, name):
                raise InvalidSetting(f"{flag_of(name)}: must not be empty")

    def check_choice(self, name: str, choices: Sequence[str]) -> None:
        """Require one of several values."""
        if getattr(self, name) not in choices:
            raise InvalidSetting(f"{flag_of(name)}: must be {', '.join(choices[:-1])} or {choices[-1]}")

    def check_addresses(self, names: Iterable[str]) -> None:
        """Require ``host:port`` where a value is given."""
        for name in names:
            if address := getattr(self, name):
                try:
                    parse_address(address)
                except ValueError as error:
                    raise InvalidSetting(f"{flag_of(name)}: {error}") from None

    def check_tls(self, *, insecure: bool, cert: str, key: str, ca: str) -> None:
        """Require either all files of mutual TLS or ``--insecure``."""
        files = (cert, key, ca)
        if insecure and any(files):
            raise InvalidSetting("--insecure: excludes --tls-cert, --tls-key and --tls-ca")
        if not insecure and not all(files):
            raise InvalidSetting(
                "--tls-cert, --tls-key, --tls-ca: all three are needed (or --insecure for a demonstration)"
            )


Settings = TypeVar("Settings", bound=BaseSettings)


def parse_settings(kind: type[Settings], arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read the settings of a program from its flags, then its environment, then the defaults.

    Args:
        kind: the program's settings dataclass.
        arguments: the command line without the program's name.
        environment: variables; those whose names do not begin with the program's prefix are ignored.

    Raises:
        InvalidSetting: a value breaks a rule. ``--help`` and unknown flags leave through argparse (SystemExit).
    """
    given: dict[str, tuple[str, str]] = {}
    for each in fields(kind):
        variable = kind.environment_prefix + each.name.upper()
        if variable in environment:
            given[each.name] = (variable, environment[variable])
    for name, text in vars(_parser(kind).parse_args(list(arguments))).items():
        if text is not None:
            given[name] = (flag_of(name), text)
    defaults = {each.name: each.default for each in fields(kind)}
    return kind(**{name: _convert(type(defaults[name]), text, source) for name, (source, text) in given.items()})


def parse_or_exit(kind: type[Settings], arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """``parse_settings``; for bad input one line on stderr and exit code 2."""
    try:
        return parse_settings(kind, arguments, environment)
    except InvalidSetting as error:
        sys.stderr.write(f"{kind.program}: {error}\n")
        sys.exit(2)


def _parser(kind: type[BaseSettings]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=kind.program,
        description=kind.description,
        epilog=f"Every flag can be given as {kind.environment_prefix}<NAME> in the environment; a flag wins.",
    )
    for each in fields(kind):
        shown = "" if each.default == "" else f" Default: {each.default}."
        doc = (each.metadata["doc"] + shown).replace("%", "%%")
        if isinstance(each.default, bool):
            parser.add_argument(flag_of(each.name), action="store_const", const="true", help=doc)
        else:
            parser.add_argument(flag_of(each.name), metavar=type(each.default).__name__.upper(), help=doc)
    return parser


def _convert(kind: type[Any], text: str, source: str) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise InvalidSetting(f"{source}: must be true or false, not {text!r}")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError:
        required = "an integer" if kind is int else "a number"
        raise InvalidSetting(f"{source}: must be {required}, not {text!r}") from None
