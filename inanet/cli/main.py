"""``ina``: the front end. Subcommands are imported when they are called, so that each costs only what it
needs.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import click

from inanet.about import bug_hint, version
from inanet.service.exits import Exit, explain


@dataclass(frozen=True, slots=True)
class Entry:
    """A subcommand: the ``module:function`` that is its click command, and its line in ``ina --help``."""

    target: str
    help: str


#: All subcommands; the help is repeated here so that listing them imports nothing.
COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "bench": Entry("inanet.bench.cli:bench", "Measure kernels and collectives on this machine."),
        "check": Entry("inanet.cli.check:check", "Validate a configuration file, a daemon's or a network's."),
        "kernels": Entry("inanet.cli.kernels:kernels", "Compile the kernels, once for this host."),
        "demo": Entry("inanet.demo.cli:demo", "Train a small model through daemons on this machine."),
        "doctor": Entry("inanet.cli.doctor:doctor", "Find out what on this machine would be in the way."),
        "install": Entry("inanet.cli.install:install", "Make daemons services of this host."),
        "keys": Entry("inanet.cli.keys:keys", "Certificates for control connections over TLS."),
        "lab": Entry("inanet.lab.cli:lab", "Networks of namespaces with rates, and commands in them."),
        "metrics": Entry(
            "inanet.cli.metrics:metrics", "List what daemons measure; dashboard and alert rules."
        ),
        "papers": Entry("inanet.cli.papers:papers", "Figures and tables of the papers, run here."),
        "plan": Entry("inanet.cli.plan:plan", "Price plans for a network and choose one, a ring among them."),
        "report": Entry("inanet.cli.report:report", "Collect what a bug report needs, without secrets."),
        "status": Entry("inanet.cli.status:status", "Show nodes, jobs and trees of a fabric."),
        "top": Entry("inanet.cli.top:top", "Show what a fabric does, live."),
        "trace": Entry("inanet.cli.trace:trace", "Merge traces of a torch job, and show the overlap."),
        "uninstall": Entry("inanet.cli.install:uninstall", "Remove the services again."),
        "zebra": Entry(
            "inanet.cli.zebra:zebra", "Sparse training: hot parameters, a switch or shard as a process."
        ),
    }
)


@dataclass(slots=True)
class Settings:
    """Options of ``ina`` itself, kept where error handling finds them."""

    debug: bool = False


class LazyGroup(click.Group):
    """A group whose commands are the entries of :data:`COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, for help and completion."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command. Raises ``ImportError`` if something it needs is not installed."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, function = entry.target.partition(":")
        command = getattr(importlib.import_module(module), function)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.target} is no click command")
        from inanet.cli.manual import with_example

        return with_example(cmd_name, command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with a name that is near an unknown one, and a place for compiled kernels."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if near and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        from inanet.service import kernel_cache

        # before a command is imported, as that may compile kernels
        if notice := kernel_cache.ensure():
            click.echo(f"ina: {notice}", err=True)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"ina {version()}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and end.",
)
@click.pass_obj
def cli(settings: Settings, debug: bool) -> None:
    """In-network aggregation for distributed training on ordinary Linux machines.

    Exit codes: 0 ok, 1 failed, 2 usage or configuration, 4 permission, 5 missing dependency, 70 bug, 130 Ctrl-C.
    """
    settings.debug = debug


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ina`` and return its exit code; ``arguments`` default to the process's."""
    settings = Settings()
    try:
        code = cli.main(arguments, prog_name="ina", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return code if isinstance(code, int) else Exit.OK
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("ina: interrupted", err=True)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has gone; the interpreter must not stumble over that again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED
    except Exception as error:
        code, message = explain(error)
        if settings.debug:
            traceback.print_exception(error)
        for line in message.splitlines():
            click.echo(f"ina: {line}", err=True)
        if code is Exit.BUG:
            click.echo(f"ina: {bug_hint()} (ina --debug shows the traceback)", err=True)
        return code


if __name__ == "__main__":
    sys.exit(main())
