"""``ina``: subcommands that cost nothing until called, and exit codes by cause."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from inanet.about import VERSION
from inanet.cli import main as front
from inanet.cli.main import COMMANDS, Entry, main
from inanet.service.exits import Failure

ROOT = Path(__file__).parents[2]
ERRORS: dict[str, BaseException] = {
    "failure": Failure("two\nlines"),
    "permission": PermissionError(1, "Operation not permitted", "/dev/x"),
    "extra": ModuleNotFoundError("No module named 'scapy'", name="scapy.all"),
    "core": ImportError("cannot import name 'x'", name="numpy"),
    "ours": ModuleNotFoundError("No module named 'inanet.x'", name="inanet.x"),
    "system": FileNotFoundError(2, "No such file or directory", "/x"),
    "interrupt": KeyboardInterrupt(),
    "memory": MemoryError(),
    "bug": KeyError("x"),
}


@click.command()
@click.argument("cause")
def fails(cause: str) -> None:
    """End with the error named."""
    raise ERRORS[cause]


@pytest.fixture
def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        **COMMANDS,
        "fails": Entry(f"{__name__}:fails", "Fail."),
        "broken": Entry("inanet.nosuch:x", "Break."),
    }
    monkeypatch.setattr(front, "COMMANDS", table)


@pytest.mark.usefixtures("_failing")
@pytest.mark.parametrize(
    ("cause", "code", "says"),
    [
        ("failure", 1, "ina: two\nina: lines\n"),
        ("permission", 4, "ina: permission denied: /dev/x: Operation not permitted\n"),
        ("extra", 5, "ina: scapy is not installed: /a/python -m pip install 'inanet[dissect]'\n"),
        (
            "core",
            5,
            "ina: numpy, which inanet needs, cannot be imported (cannot import name 'x'): /a/python -m pip install",
        ),
        ("ours", 70, "please report it"),
        ("system", 1, "ina: /x: No such file or directory\n"),
        ("interrupt", 130, "ina: interrupted\n"),
        ("memory", 1, "ina: out of memory\n"),
        ("bug", 70, "ina: KeyError: 'x'\nina: this is a bug in inanet"),
    ],
)
def test_the_cause_decides_the_exit_code(
    cause: str, code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/a/python")
    assert main(["fails", cause]) == code
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


@pytest.mark.usefixtures("_failing")
def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "fails", "bug"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("_failing")
def test_a_command_that_cannot_be_imported_breaks_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broken"]) == 70
    assert main(["--help"]) == 0
    assert "broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "Exit codes: 0 ok, 1 failed"),
        (["--version"], 0, f"ina {VERSION}\n"),
        (["doctr"], 2, "No such command 'doctr'. Did you mean 'doctor'?"),
        (["qqqq"], 2, "No such command 'qqqq'."),
        (["check"], 2, "Missing argument 'CONFIG'"),
        (["check", "--nosuch"], 2, "No such option"),
        (["check", "--help"], 0, "--role"),
    ],
)
def test_usage(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert says in (captured.err if code else captured.out)


def test_every_entry_is_a_command_of_that_name() -> None:
    context = click.Context(front.cli)
    for name, entry in COMMANDS.items():
        command = front.cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert entry.help.endswith(".")


def test_where_kernels_are_kept_is_seen_to_before_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ensure() -> str:
        monkeypatch.setattr(front, "COMMANDS", {"late": Entry(f"{__name__}:fails", "Fail.")})
        return "compiled kernels are kept in /tmp/x for now"

    monkeypatch.setattr(front, "COMMANDS", {})
    monkeypatch.setattr("inanet.service.kernel_cache.ensure", ensure)
    assert main(["late", "--help"]) == 0
    assert capsys.readouterr().err == "ina: compiled kernels are kept in /tmp/x for now\n"


def test_help_imports_no_subcommand() -> None:
    program = (
        "import sys; from inanet.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'numba', 'numpy', 'pydantic', 'structlog', 'asyncio', 'rich', 'inanet.cli.check'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "set()"


def test_a_reader_that_goes_away_is_no_bug() -> None:
    command = f"{sys.executable} -m inanet.cli.main doctor --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1)
    assert done.stderr == ""
