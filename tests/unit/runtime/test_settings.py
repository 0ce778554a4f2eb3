"""Settings of any program: precedence, conversion by the default's type, and errors that name flag and rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from perseus_runtime.settings import BaseSettings, InvalidSetting, flag_of, names_of, parse_settings, setting


@dataclass(frozen=True)
class Settings(BaseSettings):
    program = "sample"
    description = "A sample."
    environment_prefix = "SAMPLE_"

    listen_address: str = setting("", "Where it listens, 100 % of the time.")
    workers: int = setting(2, "How many at a time.", minimum=1)
    timeout_s: float = setting(1.5, "Longest wait, seconds.", minimum=0.1)
    insecure: bool = setting(False, "No TLS.")
    mode: str = setting("fast", "fast or slow.")
    cert: str = setting("", "Certificate.")

    def check(self) -> None:
        self.check_choice("mode", ("fast", "slow"))
        self.check_addresses(["listen_address"])
        self.check_tls(insecure=self.insecure, cert=self.cert, key=self.cert, ca=self.cert)
        self.check_not_empty("mode")


def read(*arguments: str, **environment: str) -> Settings:
    return parse_settings(Settings, arguments, environment)


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    settings = read("--workers=4", "--insecure", SAMPLE_WORKERS="3", SAMPLE_TIMEOUT_S="2", OTHER_MODE="slow")
    assert settings == Settings(workers=4, timeout_s=2.0, insecure=True)
    assert type(settings.timeout_s) is float


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("False", False), ("0", False), ("", False)])
def test_a_switch_is_read_from_the_environment(text: str, value: bool) -> None:
    assert read("--cert=" + ("" if value else "x"), SAMPLE_INSECURE=text).insecure is value


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--workers=two"], {}, "--workers: must be an integer, not 'two'"),
        (["--workers=0"], {}, "--workers: must be at least 1"),
        ([], {"SAMPLE_TIMEOUT_S": "soon"}, "SAMPLE_TIMEOUT_S: must be a number, not 'soon'"),
        ([], {"SAMPLE_INSECURE": "perhaps"}, "SAMPLE_INSECURE: must be true or false, not 'perhaps'"),
        (["--insecure", "--mode=medium"], {}, "--mode: must be fast or slow"),
        (["--insecure", "--listen-address=here"], {}, "--listen-address: must be host:port"),
        (["--insecure", "--cert=x"], {}, "--insecure: excludes --tls-cert"),
        ([], {}, "--tls-cert, --tls-key, --tls-ca: all three are needed"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(arguments: list[str], environment: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        read(*arguments, **environment)
    assert str(refused.value).startswith(message)


def test_help_shows_flag_effect_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "A sample." in shown
    assert "--timeout-s FLOAT Longest wait, seconds. Default: 1.5." in shown
    assert "100 % of the time." in shown
    assert "SAMPLE_<NAME>" in shown


def test_names_of_a_list_have_no_spaces() -> None:
    assert names_of(" a, ,b ") == ("a", "b")
    assert names_of("") == ()
    assert flag_of("log_level") == "--log-level"
