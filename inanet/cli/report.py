"""``ina report``: what a bug report needs, in one file, without secrets."""

import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from inanet.about import version
from inanet.cli import coordinators
from inanet.cli.doctor import PROBES
from inanet.cli.findings import examine
from inanet.cli.scraping import scrape
from inanet.config.daemons import PROGRAMS, load
from inanet.config.file import SYSTEM_DIRECTORY
from inanet.service.exits import Failure

#: What stands where a secret was.
REMOVED = "<removed>"
#: Lines of the journal that are taken, of all services together.
LINES = 2000
#: Seconds for each question.
_SECONDS = 5.0
_SECRET_KEYS = re.compile(r"^(\s*(?:token|secret)\s*=\s*)(.+)$", re.MULTILINE)
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
#: Files that hold one secret as a whole.
_TOKENS = ("token",)


class Secrets:
    """What must not leave this host: tokens and private keys, wherever they turn up."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def learn(self, text: str) -> None:
        """A secret itself; short ones would hide half of a log, and are no secrets."""
        if len(text.strip()) >= 8:
            self._values.add(text.strip())

    def learn_file(self, path: Path) -> None:
        """A daemon's file, and the token file that it names."""
        text = path.read_text("utf-8", errors="replace")
        for match in _SECRET_KEYS.finditer(text):
            self.learn(match[2].partition("#")[0].strip().strip("\"'"))
        for match in re.finditer(r'^\s*token_file\s*=\s*["\'](.+?)["\']', text, re.MULTILINE):
            name = match[1].replace("$CREDENTIALS_DIRECTORY", str(SYSTEM_DIRECTORY))
            try:
                self.learn((path.parent / os.path.expandvars(name)).read_text("utf-8"))
            except (OSError, UnicodeDecodeError):
                continue

    def remove(self, text: str) -> str:
        """The text without them."""
        text = _PRIVATE.sub(REMOVED, _SECRET_KEYS.sub(rf'\1"{REMOVED}"', text))
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, REMOVED)
        return text


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, writable=True))
@click.option(
    "--config",
    type=click.Path(dir_okay=False, exists=True),
    metavar="FILE",
    help="A daemon's file of this machine, instead of those in /etc/inanet.",
)
def report(file: Path, config: str | None) -> None:
    """Collect into FILE (a .tar.gz) what a bug report needs: versions, configuration, the doctor's findings, counters, plans and the
    last lines of the logs.

    Tokens and private keys are removed. Look at it before you send it: names and addresses of hosts stay.
    """
    secrets = Secrets()
    with coordinators.given(config):
        files = coordinators.files()
        for path in files:
            secrets.learn_file(path)
        for name in _TOKENS:
            if (SYSTEM_DIRECTORY / name).exists():
                secrets.learn((SYSTEM_DIRECTORY / name).read_text("utf-8", errors="replace"))
        parts = {name: secrets.remove(_guarded(make)) for name, make in _parts(files)}
    try:
        _write(file, parts)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror}") from None
    click.echo(f"{file}: {', '.join(parts)}")
    click.echo("secrets are removed; names and addresses of hosts are in it: look at it before you send it")


def _parts(files: Iterable[Path]) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "versions.json", _versions
    for path in files:
        yield f"config/{path.name}", path.read_text
    yield "doctor.json", lambda: json.dumps([asdict(one) for one in examine(PROBES)], indent=2)
    yield "fabric.json", lambda: json.dumps(coordinators.target().ask(_SECONDS).model_dump(), indent=2)
    for path in files:
        yield f"counters/{path.stem}.json", partial(_counters, path)
    units = [f"{program}.service" for program in PROGRAMS.values()]
    yield "units.txt", lambda: _output("systemctl", "status", "--no-pager", "--lines=0", *units)
    matches = [f"--unit={unit}" for unit in units]
    yield (
        "journal.txt",
        lambda: _output("journalctl", "--no-pager", "--output=short-iso", f"--lines={LINES}", *matches),
    )
    yield "addresses.txt", lambda: _output("ip", "-details", "address")
    yield "limits.txt", lambda: _output("sysctl", "net.core", "net.ipv4.udp_mem")


def _guarded(make: Callable[[], str]) -> str:
    """A part, or why there is none: a report is wanted most where things do not work."""
    try:
        return make()
    except (Failure, OSError, ValueError, subprocess.SubprocessError) as error:
        return f"not there: {error}\n"


def _versions() -> str:
    packages = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    found = {
        "inanet": version(),
        "python": sys.version,
        "interpreter": sys.executable,
        "kernel": platform.platform(),
        "processors": os.cpu_count(),
        "time": time.strftime("%FT%T%z"),
        "packages": dict(sorted(packages.items())),
    }
    return json.dumps(found, indent=2)


def _counters(path: Path) -> str:
    listen = load(path, from_outside=True).metrics.listen
    if listen is None:
        return "not there: metrics.listen is not set\n"
    return json.dumps([asdict(one) for one in scrape(str(listen), _SECONDS).values], indent=2)


def _output(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=30
    )
    return done.stdout + done.stderr


def _write(file: Path, parts: dict[str, str]) -> None:
    """A compressed archive with one folder, readable by its owner."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in parts.items():
            entry = tarfile.TarInfo(f"inanet-report/{name}")
            data = text.encode(errors="replace")
            entry.size, entry.mode, entry.mtime = len(data), 0o644, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
