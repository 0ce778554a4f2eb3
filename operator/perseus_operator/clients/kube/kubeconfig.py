"""Reading a kubeconfig by one of the official clients, each of which raises whatever its libraries raise."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from perseus_operator.errors import UnusableArgument

_WHERE: Final = "KUBECONFIG"
_DEFAULT: Final = "~/.kube/config"
_MOST_BYTES: Final = 4 << 20
"""Of a file: hundreds of clusters with their certificates. Read as YAML that takes a second."""


@contextlib.contextmanager
def reading_kubeconfig(refusal: type[Exception], files: str | None = None) -> Iterator[None]:
    """Turn everything that is wrong with a kubeconfig into an error of one line, which holds nothing of its content.

    Args:
        refusal: what the client raises for one that it cannot use.
        files: to read, separated as in ``KUBECONFIG``; None: what that names, or ``~/.kube/config``.

    Raises:
        UnusableArgument: inside, something was wrong with it, or was logged as an error: that the command which fetches
            a token has failed.
    """
    for name in (files or os.environ.get(_WHERE) or _DEFAULT).split(os.pathsep):
        with contextlib.suppress(OSError):
            if Path(name).expanduser().stat().st_size > _MOST_BYTES:
                raise UnusableArgument(f"no usable kubeconfig: {name}: must have at most {_MOST_BYTES:,} bytes")
    with _logged_errors() as problems:
        try:
            yield
        except refusal as error:
            raise UnusableArgument(f"no usable kubeconfig: {_one_line(error)}") from error
        except OSError as error:
            raise UnusableArgument(f"no usable kubeconfig: {error.filename}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise UnusableArgument(f"no usable kubeconfig: it is no YAML: {_one_line(error)}") from error
        except UnicodeDecodeError as error:
            raise UnusableArgument("no usable kubeconfig: it is no UTF-8 text") from error
        except ValueError as error:
            raise UnusableArgument(f"no usable kubeconfig: a value cannot be used: {_one_line(error)}") from error
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise UnusableArgument(f"no usable kubeconfig: it is none: {_one_line(error)}") from error
    if problems:  # kubectl ends here, too
        raise UnusableArgument(f"no usable kubeconfig: {_one_line(problems[0])}")


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """What a client logs instead of raising it."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    before, root.handlers = root.handlers, [handler]
    try:
        yield messages
    finally:
        root.handlers = before


def _one_line(what: object) -> str:
    return " ".join(str(what).split())[:300]
