"""The command line that all daemons share. A daemon gives a role and a ``serve`` coroutine and gets its
``main``.

Kept light: nothing but click is imported until a configuration has to be read, and nothing of the data plane
until the daemon runs, so that ``--help`` and ``--check`` answer at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

import click

from inanet.about import bug_hint, version
from inanet.service.exits import Exit, explain
from inanet.service.journal import is_journal, prioritised

if TYPE_CHECKING:
    from daemons._lifecycle import LoopName, Serve
    from inanet.config.daemons import DaemonFile, Role

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "pretty", "json", "plain")


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"{context.find_root().info_name} {version()}")
        context.exit()


def _end(code: Exit) -> NoReturn:
    """End the process at once. Everything is closed and written; taking the interpreter and the compiled kernels apart
    as well would keep whoever waits for the end waiting: on a busy host, for seconds."""
    for stream in (sys.stdout, sys.stderr):
        # whoever read it may be gone: that is no other way of ending
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(code)


def _open_standard() -> None:
    """Something is open where standard input, output and error are, whoever started this: whatever is opened next would be taken
    for one of them, and libuv ends a process that has such a descriptor."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def command(role: Role, serve: Serve[Any], help: str) -> click.Command:
    """The ``main`` of the daemon ``ina-ROLE``.

    ``serve(config, context)`` is awaited inside the event loop; it sets up, calls ``context.ready(...)``,
    works until ``context.stopping`` is set, drains within ``context.remaining`` seconds and returns. What it
    raises decides the exit code (:func:`inanet.service.exits.explain`). Import the data plane inside
    ``serve``, not around it.
    """

    @click.command(f"ina-{role}", help=help, context_settings={"max_content_width": 100})
    @click.option(
        "--config",
        "file",
        default=f"{role}.toml",
        metavar="FILE",
        help=f"Configuration, a TOML file. Default: {role}.toml here or in /etc/inanet.",
    )
    @click.option(
        "--check", is_flag=True, help="Print the effective configuration, or what is wrong, and end."
    )
    @click.option(
        "--reload",
        "running",
        type=click.IntRange(1),
        metavar="PID",
        help="Have the daemon with this process id read the file again, unless something is wrong with it.",
    )
    @click.option("--log-level", type=click.Choice(LEVELS), help="Instead of log.level of the file.")
    @click.option("--log-format", type=click.Choice(FORMATS), help="Instead of log.format of the file.")
    @click.option("--loop", type=click.Choice(("uvloop", "asyncio")), default="uvloop", hidden=True)
    @click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_version,
        help="Print the version and end.",
    )
    @click.pass_context
    def main(
        context: click.Context,
        file: str,
        check: bool,
        running: int | None,
        log_level: str | None,
        log_format: str | None,
        loop: LoopName,
    ) -> None:
        _open_standard()
        options = {"level": log_level, "format": log_format}
        overrides = {"log": {key: value for key, value in options.items() if value is not None}}

        def read() -> DaemonFile:
            from inanet.config.daemons import load

            return load(file, role, overrides, from_outside=running is not None)

        def read_all() -> DaemonFile:
            """Also the certificate, which a daemon that starts looks at when it has said whose it is."""
            from inanet.config.certificate import problems
            from inanet.config.file import ConfigError, find_file

            found = read()
            if wrong := problems(role, found):
                raise ConfigError(find_file(file), wrong)
            return found

        code, message = Exit.OK, ""
        if running is not None:
            # systemd gives credentials to the daemon alone: they are looked at where they come from
            os.environ.pop("CREDENTIALS_DIRECTORY", None)
        try:
            config = read_all() if check or running is not None else read()
        except Exception as error:
            code, message = explain(error)
            if code is Exit.BUG:
                message = f"{''.join(traceback.format_exception(error))}{bug_hint()}"
        if running is not None:
            # also with a broken file: the daemon says in its status that it goes on with the one before
            os.kill(running, signal.SIGHUP)
        if code is not Exit.OK:
            if is_journal(sys.stderr, os.environ):
                message = prioritised(message, "error")
            # whoever would read it may be gone: that is no other error
            with contextlib.suppress(OSError, AttributeError):
                click.echo(message, err=True)
        if code is not Exit.OK or running is not None:
            context.exit(code)
        if check:
            from inanet.config.file import write_toml

            click.echo(write_toml(config), nl=False)
            context.exit(Exit.OK)
        # structlog imports rich where it is installed, for tracebacks that no daemon prints: 4 MB and a tenth of a second
        modules: dict[str, Any] = sys.modules
        modules.setdefault("rich", None)
        from daemons._lifecycle import run

        if modules["rich"] is None:
            del modules["rich"]
        _end(run(role, config, serve, read, loop))

    return main
