"""Which coordinator a command asks, and how it proves that it may: from options, or from a daemon's configuration."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from inanet.config.daemons import AggConfig, PsConfig, WorkerConfig, load
from inanet.config.file import SYSTEM_DIRECTORY
from inanet.config.manager import ManagerConfig
from inanet.config.switch import SwitchConfig
from inanet.messages.registration import Overview
from inanet.service.addresses import AddressError, parse_host_port, resolve
from inanet.service.exits import Exit, Failure
from inanet.trust.certificates import Keys
from inanet.trust.revocation_list import Revocations

if TYPE_CHECKING:
    from inanet.aio.reachability import Reach

T = TypeVar("T")

#: Files that are looked for in :data:`~inanet.config.file.SYSTEM_DIRECTORY`, in this order.
FILES = ("manager.toml", "ps.toml", "worker.toml", "agg.toml", "switch.toml")
#: a file to take instead of those
_given: ContextVar[Path | None] = ContextVar("_given", default=None)


class NoCoordinator(Failure):
    """Neither an option nor a file says whom to ask."""

    code = Exit.USAGE


@contextmanager
def given(file: str | None) -> Iterator[None]:
    """Within the block this is the only file of the machine, unless it is None."""
    token = _given.set(Path(file) if file is not None else None)
    try:
        yield
    finally:
        _given.reset(token)


def files() -> list[Path]:
    """Daemons' files of this machine."""
    file = _given.get()
    if file is not None:
        return [file]
    return [SYSTEM_DIRECTORY / name for name in FILES if (SYSTEM_DIRECTORY / name).exists()]


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator's address, and what it wants to see. ``name`` and ``listen`` are the name and the IPv4 address of this
    machine's own node, if a file says so and it can be resolved.
    """

    address: str
    token: str = ""
    keys: Keys | None = None
    name: str = ""
    listen: str = ""

    def ask(self, seconds: float) -> Overview:
        """What there is to see. Raises :class:`Failure` with a sentence if there is no answer."""
        from inanet.aio.query import ask

        return self._spoken(lambda: asyncio.run(ask(self.address, self.token, self.keys, seconds)))

    def reach(self, seconds: float) -> "Reach":
        """Whether multicast gets here from there. Raises :class:`Failure` if there is no answer."""
        from inanet.aio.reachability import reach

        return self._spoken(lambda: asyncio.run(reach(self.address, self.token, self.keys, seconds)))

    def _spoken(self, action: Callable[[], T]) -> T:
        """What a conversation with the coordinator comes to, its errors as a sentence."""
        from inanet.aio.channel import ChannelClosed, DeadlineError
        from inanet.messages.codec import ControlError
        from inanet.service import logs

        # beside the answer, not in it
        logs.configure("warning", "plain", stream=sys.__stderr__)
        try:
            return action()
        except (DeadlineError, ChannelClosed, ControlError) as error:
            raise Failure(f"no answer from the coordinator: {error}") from None


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that :func:`target` takes."""
    path = click.Path(dir_okay=False)
    listed = (
        click.option(
            "--config",
            metavar="FILE",
            help="A daemon's file that says who coordinates. Default: /etc/inanet.",
        ),
        click.option("--address", metavar="HOST:PORT", help="Where the coordinator listens, or unix:/path."),
        click.option("--token-file", type=path, help="With --address: the fabric's secret."),
        click.option("--ca-file", type=path, help="With --address: the authority's certificate, for TLS."),
        click.option(
            "--key-file", type=path, help="With --address: this node's certificate and key, for TLS."
        ),
        click.option(
            "--revoked-file",
            type=path,
            help="With --ca-file: certificates that are no longer good, the coordinator's perhaps.",
        ),
        click.option("--insecure", is_flag=True, help="With --address: show the token to whoever listens."),
        click.option(
            "--timeout", type=click.FloatRange(0.1), default=5.0, show_default=True, help="Seconds."
        ),
    )
    # the last that is put on comes first in the help
    for option in reversed(listed):
        command = option(command)
    return command


def target(
    config: str | None = None,
    address: str | None = None,
    token_file: str | None = None,
    ca_file: str | None = None,
    key_file: str | None = None,
    revoked_file: str | None = None,
    insecure: bool = False,
) -> Target:
    """Whom to ask. Raises :class:`NoCoordinator`, and what reading files raises."""
    if address is not None:
        keys = _keys(ca_file, key_file, revoked_file)
        local = _stays_here(address)
        if keys is None and token_file is not None and not insecure and not local:
            raise NoCoordinator(
                f"{address} is another machine, and the token would go there for everybody on the way to read: give "
                "--ca-file and --key-file, which 'ina keys' makes, or --insecure"
            )
        token = Path(token_file).read_text("utf-8").strip() if token_file is not None else ""
        return Target(address, token, keys)
    if config is None:
        found = files()
        if not found:
            raise NoCoordinator(
                f"whom to ask? Give --address HOST:PORT or --config FILE; {SYSTEM_DIRECTORY} has none of "
                f"{', '.join(FILES)}"
            )
        config = str(found[0])
    return _of_file(config)


def _keys(ca_file: str | None, key_file: str | None, revoked_file: str | None) -> Keys | None:
    """The files for TLS, if they were given. Raises :class:`NoCoordinator` if some of them are of no use."""
    if (ca_file is None) != (key_file is None):
        raise NoCoordinator("--ca-file and --key-file belong together: 'ina keys' makes both")
    if ca_file is None or key_file is None:
        if revoked_file is not None:
            raise NoCoordinator("--revoked-file is about certificates: give --ca-file and --key-file as well")
        return None
    if revoked_file is None:
        return Keys(ca_file, key_file)
    try:
        return Keys(ca_file, key_file, Revocations(revoked_file))
    except ValueError as error:
        raise NoCoordinator(f"{revoked_file}: {error}") from None


def _stays_here(address: str) -> bool:
    """Whether an address is one of this machine. Raises :class:`NoCoordinator` if it is none at all."""
    try:
        return parse_host_port(address, unix=True).local
    except ValueError as error:
        raise NoCoordinator(str(error)) from None


def _of_file(config: str) -> Target:
    daemon = load(config, from_outside=True)
    if isinstance(daemon, ManagerConfig):
        where = daemon.control.listen
    elif isinstance(daemon, PsConfig):
        where = daemon.control.coordinator or daemon.control.listen
    elif isinstance(daemon, WorkerConfig | AggConfig | SwitchConfig) and daemon.control.coordinator:
        where = daemon.control.coordinator
    else:
        raise NoCoordinator(f"{config} has no control.coordinator: give --address")
    address = str(where).replace("0.0.0.0:", "127.0.0.1:")
    name, listen = (daemon.node.name, "") if isinstance(daemon, SwitchConfig) else ("", "")
    if isinstance(daemon, WorkerConfig | AggConfig | PsConfig):
        name = daemon.node.name
        with suppress(AddressError):
            listen = resolve(daemon.node.listen).address
    return Target(address, daemon.control.secret(), daemon.control.tls_keys(), name, listen)
