"""The command line of daemons: what they print and which exit code they end with, without running them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemons._chassis import FORMATS, LEVELS, command
from inanet.config.daemons import Log
from tests.daemons.processes import ROOT


async def never(config: object, context: object) -> None:
    """A daemon that must not be started."""
    raise AssertionError("started")


def invoke(*arguments: str) -> Result:
    """Run the command line of an aggregator in this process."""
    return CliRunner().invoke(command("agg", never, "An aggregator."), arguments, catch_exceptions=False)


def test_check_prints_the_effective_configuration_and_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "agg.toml"
    file.write_text('[node]\nname = "a0"\n[control]\ncoordinator = "127.0.0.1"\ntoken = "do-not-show-this"\n')
    result = invoke("--config", str(file), "--check", "--log-level", "debug")
    assert result.exit_code == 0, result.stderr
    effective = tomllib.loads(result.stdout)
    assert effective["node"]["name"] == "a0"
    assert effective["log"] == {"level": "debug", "format": "auto"}
    assert effective["control"]["coordinator"] == "127.0.0.1:7400"
    assert "do-not-show-this" not in result.output


def test_every_error_is_a_line_with_the_file_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "agg.toml"
    file.write_text('[nod]\n[control]\ncoordinator = "::1"\nheartbeat = 1\n')
    result = invoke("--config", str(file), "--check")
    assert result.exit_code == 2
    assert result.stdout == ""
    keys = [line.removeprefix(f"{file}: ").partition(":")[0] for line in result.stderr.splitlines()]
    assert keys == ["control.heartbeat", "control.coordinator", "nod"]


def test_a_missing_file_names_the_places_searched() -> None:
    result = invoke("--config", "nosuch.toml", "--check")
    assert result.exit_code == 2
    assert f"searched {Path.cwd() / 'nosuch.toml'}, /etc/inanet/nosuch.toml" in result.stderr


def test_a_file_that_may_not_be_read_is_a_matter_of_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agg.toml"
    file.touch()

    def refuse(path: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    result = invoke("--config", str(file), "--check")
    assert result.exit_code == 4
    assert f"permission denied: {file}" in result.stderr


def test_an_error_nobody_foresaw_is_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inanet.config.daemons.load", lambda *arguments: 1 // 0)
    result = invoke("--config", "agg.toml")
    assert result.exit_code == 70
    assert "please report it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--help",), 0, "--log-format"),
        (("--version",), 0, "ina-agg "),
        ((), 2, "agg.toml: no such file; searched "),
        (("--config", "x", "--log-level", "loud"), 2, "is not one of"),
        (("--config", "x", "extra"), 2, "unexpected extra argument"),
    ],
)
def test_usage(arguments: tuple[str, ...], code: int, says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert says in result.output
    assert "--loop" not in result.output


def test_choices_are_those_of_the_file() -> None:
    assert Log.model_fields["level"].annotation.__args__ == LEVELS  # type: ignore[union-attr]
    assert Log.model_fields["format"].annotation.__args__ == FORMATS  # type: ignore[union-attr]


@pytest.mark.parametrize("role", ["worker", "agg"])
def test_check_imports_nothing_of_the_data_plane(role: str) -> None:
    program = (
        "import sys; from daemons._chassis import command\n"
        f"try: command('{role}', None, '')(['--config', 'configs/{role}.toml', '--check'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numba', 'numpy', 'uvloop', 'structlog', 'prometheus_client', 'asyncio'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "set()"
