"""Starting a toy daemon as a process and waiting for what it says, without sleeping."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0


@dataclass
class Daemon:
    """A running toy daemon and its notification socket."""

    process: subprocess.Popen[str]
    channel: socket.socket

    def notified(self, *wanted: str) -> dict[str, str]:
        """The next notification that has all the keys ``wanted``; others are passed over."""
        while True:
            readable, _, _ = select.select([self.channel], [], [], PATIENCE)
            assert readable, f"no notification with {wanted}"
            lines = self.channel.recv(4096).decode().splitlines()
            found = dict(line.split("=", 1) for line in lines)
            if all(key in found for key in wanted):
                return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit status and everything it wrote to stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


def toy_command(*arguments: str) -> list[str]:
    """Command line of the toy daemon."""
    return [sys.executable, "-m", "tests.daemons.toy", *arguments]


def config(directory: Path, name: str, extra: str = "") -> Path:
    """A file for the toy daemon."""
    file = directory / "toy.toml"
    file.write_text(f'[node]\nname = "{name}"\n[control]\ncoordinator = "127.0.0.1:1"\n{extra}')
    return file


@contextlib.contextmanager
def running(
    directory: Path, name: str, *arguments: str, extra: str = "", environ: Mapping[str, str] | None = None
) -> Iterator[Daemon]:
    """The toy daemon under a notification socket; killed at the end if it still runs."""
    address = str(directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address)
        process = subprocess.Popen(
            toy_command("--config", str(config(directory, name, extra)), *arguments),
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": address, **(environ or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield Daemon(process, channel)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
