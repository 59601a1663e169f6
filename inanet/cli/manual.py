"""Manual pages and completion of shells, made from the commands themselves; 'ina install' lays them down."""

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from inanet.about import version

#: An example of every command of ``ina``, shown at the end of its help.
EXAMPLES: Mapping[str, str] = {
    "bench allreduce": "ina bench allreduce -b '4 KiB' -e '64 MiB' -f 4 --system switchml",
    "bench compare": "ina bench compare --workers 4 --size '16 MiB'",
    "bench control": "ina bench control -n 100 --json",
    "bench growth": "ina bench growth --rounds 20 --workers 2",
    "bench kernels": "ina bench kernels --repetitions 5",
    "bench netreduce": "ina bench netreduce --size '16 MiB' --pcap ring.pcap",
    "bench numbers": "ina bench numbers --json",
    "bench plan": "ina bench plan --topology star4 --size '97 MiB'",
    "bench scheduler": "ina bench scheduler --workers 128",
    "bench sparse": "ina bench sparse --workers 4 --shards 2",
    "bench switch": "ina bench switch --only atp --seconds 5",
    "bench torch": "ina bench torch --steps 50",
    "bench xdp": "ina bench xdp --size '16 MiB'",
    "check": "ina check /etc/inanet/worker.toml",
    "demo": "ina demo --system atp --impair 0.05",
    "doctor": "ina doctor --config /etc/inanet/worker.toml",
    "install": "ina install worker --coordinator host0 --listen eth0 --name w0 --keys KEYS",
    "kernels": "ina kernels --for worker",
    "keys init": "ina keys init KEYS",
    "keys issue": "ina keys issue KEYS a0 --role aggregator,status",
    "keys revoke": "ina keys revoke KEYS w3",
    "keys show": "ina keys show KEYS/w3.pem",
    "lab down": "ina lab down --all",
    "lab list": "ina lab list",
    "lab run": "ina lab run star2 -- python train.py",
    "lab up": "ina lab up star4 --name mine",
    "metrics": "ina metrics --alerts",
    "papers list": "ina papers list",
    "papers run": "ina papers run goat-example --plot goat.png",
    "plan": "ina plan 8x10Gbit/s+1x100Gbit/s --size '97 MiB' --compute '300 ms'",
    "report": "ina report report.tar.gz",
    "status": "ina status --address host0:7400 --ca-file ca.pem --key-file me.pem",
    "top": "ina top --interval 2",
    "trace": "ina trace traces/ -o merged.json",
    "uninstall": "ina uninstall worker --purge",
    "zebra hot": "ina zebra hot clicks.csv -o hot.txt",
    "zebra serve": "ina zebra serve job.toml shard0 --state shard0.state",
}
#: Sections of the manual: programs of users, and daemons.
_USER, _DAEMON = "1", "8"


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands below a group, groups before what is in them; without those of packages that are not installed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        try:
            command = group.get_command(context, name)
        except ImportError:
            continue
        if command is None or command.hidden:
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def _escape(text: str) -> str:
    """Text as roff takes it."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield _escape(" ".join(paragraph.replace("\b", "").split()))


def _usage(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    return " ".join(command.collect_usage_pieces(context))


def _options(command: click.Command) -> Iterator[str]:
    context = click.Context(command)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:
            yield ".TP"
            yield f".B {_escape(record[0])}"
            yield _escape(" ".join(record[1].split()))


def page(name: str, command: click.Command, section: str = _USER) -> str:
    """The manual page of a program or command; one of a group says what its commands take as well."""
    title = name.replace(" ", "-")
    summary = command.get_short_help_str(120).rstrip(".")
    lines = [
        f'.TH {_escape(title.upper())} {section} "" "inanet {version()}" "inanet"',
        ".SH NAME",
        f"{_escape(title)} \\- {_escape(summary)}",
        ".SH SYNOPSIS",
        f".B {_escape(name)}",
        _escape(_usage(name, command)),
        ".SH DESCRIPTION",
    ]
    for paragraph in _paragraphs(command.help or summary):
        lines += [".PP", paragraph]
    lines += [".SH OPTIONS", *_options(command)]
    examples = [EXAMPLES[key] for key in (name.removeprefix("ina "),) if key in EXAMPLES]
    if isinstance(command, click.Group):
        for path, one in commands(command):
            if not isinstance(one, click.Group) and name != "ina":
                whole = f"{name} {' '.join(path)}"
                lines += [
                    f".SH {_escape(' '.join(path).upper())}",
                    f".B {_escape(whole)}",
                    _escape(_usage(whole, one)),
                ]
                for paragraph in _paragraphs(one.help or ""):
                    lines += [".PP", paragraph]
                lines += list(_options(one))
                examples += [EXAMPLES[key] for key in (whole.removeprefix("ina "),) if key in EXAMPLES]
            elif name == "ina" and len(path) == 1:
                lines += [".TP", f".BR ina\\-{path[0]} (1)", _escape(one.get_short_help_str(120))]
    if examples:
        lines.append(".SH EXAMPLES")
        for example in examples:
            lines += [".PP", ".nf", _escape(example), ".fi"]
    if section == _DAEMON:
        lines += [".SH FILES", f"/etc/inanet/{name.removeprefix('ina-')}.toml".replace("-", "\\-")]
    lines += [
        ".SH EXIT STATUS",
        "0 ok, 1 failed, 2 usage or configuration, 4 permission, 5 an optional package is missing, 70 a bug, 130 Ctrl\\-C.",
    ]
    return "\n".join(lines) + "\n"


def _programs() -> Iterator[tuple[str, click.Command]]:
    """The daemons."""
    from inanet.config.daemons import PROGRAMS

    for program in PROGRAMS.values():
        module = {"ina-agg": "aggregator"}.get(program, program.removeprefix("ina-"))
        yield program, importlib.import_module(f"daemons.{module}").main


def pages(cli: click.Group) -> dict[Path, str]:
    """All manual pages, by their places below a ``share`` folder."""
    found = {Path("man/man1/ina.1"): page("ina", cli)}
    for path, command in commands(cli):
        if len(path) == 1:
            found[Path(f"man/man1/ina-{path[0]}.1")] = page(f"ina {path[0]}", command)
    for program, command in _programs():
        found[Path(f"man/man8/{program}.8")] = page(program, command, _DAEMON)
    return found


#: Where shells look for what completes a program, below a ``share`` folder.
_PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}


def completions(cli: click.Group) -> dict[Path, str]:
    """What the shells need to complete ``ina`` and the daemons, by place below a ``share`` folder. They ask the program."""
    from click.shell_completion import get_completion_class

    found = {}
    for program, command in (("ina", cli), *_programs()):
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        for shell, place in _PLACES.items():
            kind = get_completion_class(shell)
            assert kind is not None
            completion = kind(command, {}, program, variable)
            # not source(), which runs bash to learn its version
            text = completion.source_template % completion.source_vars()
            found[Path(place.format(program))] = text.strip() + "\n"
    return found


def with_example(name: str, command: click.Command) -> click.Command:
    """The command, and all below it, with their examples at the end of their help."""
    if name in EXAMPLES and command.epilog is None:
        command.epilog = f"Example: {EXAMPLES[name]}"
    if isinstance(command, click.Group):
        for path, one in commands(command):
            key = " ".join((name, *path))
            if key in EXAMPLES and one.epilog is None:
                one.epilog = f"Example: {EXAMPLES[key]}"
    return command
