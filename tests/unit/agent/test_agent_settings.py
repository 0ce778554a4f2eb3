"""The agent's settings: a flag wins over the environment, a wrong value is one error, --help names every setting."""

from __future__ import annotations

from dataclasses import fields

import pytest

from perseus_agent.__main__ import main
from perseus_agent.errors import SettingsError
from perseus_agent.settings import Settings, parse_settings

TLS = ["--tls-cert=a", "--tls-key=b", "--tls-ca=c"]


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {
        "PERSEUS_AGENT_NODE_NAME": "from-env",
        "PERSEUS_AGENT_SETTLE_MS": "7",
        "PERSEUS_AGENT_INSECURE": "true",
    }
    settings = parse_settings(["--node-name", "from-flag"], environment)
    assert (settings.node_name, settings.settle_ms, settings.insecure) == ("from-flag", 7, True)
    assert settings.sample_interval_ms == Settings.__dataclass_fields__["sample_interval_ms"].default


@pytest.mark.parametrize(
    ("flags", "environment", "rule"),
    [
        ([], {}, "--tls-cert, --tls-key, --tls-ca: all three are needed"),
        (["--tls-cert=a", "--tls-key=b"], {}, "all three are needed"),
        (["--insecure", *TLS], {}, "--insecure: excludes"),
        ([*TLS, "--allowed-san= , "], {}, "--allowed-san: must name at least one"),
        (["--insecure", "--settle-ms=soon"], {}, "--settle-ms: must be an integer, not 'soon'"),
        (["--insecure"], {"PERSEUS_AGENT_SETTLE_MS": "x"}, "PERSEUS_AGENT_SETTLE_MS: must be an integer, not 'x'"),
        (
            [],
            {"PERSEUS_AGENT_INSECURE": "perhaps"},
            "PERSEUS_AGENT_INSECURE: must be true or false, not 'perhaps'",
        ),
        (["--insecure", "--min-switch-interval-us=-1"], {}, "--min-switch-interval-us: must be at least 0"),
        (["--insecure", "--journal="], {}, "--journal: must not be empty"),
        (["--insecure", "--log-level=LOUD"], {}, "--log-level: must be"),
        (["--insecure", "--grpc-address=here"], {}, "--grpc-address: must be host:port"),
        (["--insecure", "--metrics-address=unix:/x"], {}, "--metrics-address: must be host:port"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(flags: list[str], environment: dict[str, str], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule.replace("(", r"\(")):
        parse_settings(flags, environment)


def test_allowed_names_are_a_list() -> None:
    assert parse_settings([*TLS, "--allowed-san=a, spiffe://b ,"], {}).allowed_sans == {"a", "spiffe://b"}


def test_a_command_that_has_moved_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "--gpu", "0"]) == 2
    assert capsys.readouterr().err == "perseus-agent: accept is a program of its own now: run perseus-bench\n"


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_settings(["--help"], {})
    shown = capsys.readouterr().out
    for setting in fields(Settings):
        flag = "--" + setting.name.replace("_", "-")
        assert flag in shown
        assert len(setting.metadata["doc"]) > 20
