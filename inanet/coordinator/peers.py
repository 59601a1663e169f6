"""Connections of a coordinator: who is there, and who has stopped answering."""

from collections.abc import Iterator
from dataclasses import dataclass

from inanet.coordinator.settings import Settings
from inanet.messages.control import Hello, Ping
from inanet.messages.registration import Register
from inanet.trust.certificates import Certified


@dataclass(slots=True)
class Peer:
    """One connection. ``job`` is the number of the job a worker belongs to."""

    id: int
    next_ping: float
    #: by then it must have said something
    deadline: float | None
    #: when it was asked first since it last said something
    asked: float
    hello: Hello | None = None
    #: of a connection on which a daemon registers and reports
    card: Register | None = None
    #: what its certificate says; None without TLS
    certificate: Certified | None = None
    job: int | None = None
    #: number of the last ping
    nonce: int = 0
    #: of one that is registered: whether its other connection is gone, and nothing was heard since
    told: bool = False
    #: it was said that it does not answer though its host does
    frozen: bool = False

    @property
    def known(self) -> Hello | Register | None:
        """Who it is, once it has said so."""
        return self.hello or self.card

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.known.role} {self.known.name!r}" if self.known else f"connection {self.id}"


class Peers:
    """All connections, by the id the process around gives them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._peers: dict[int, Peer] = {}
        self._interval = settings.silence / 3

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def get(self, peer_id: int) -> Peer | None:
        """The peer with this id, unless it is gone."""
        return self._peers.get(peer_id)

    def add(self, peer_id: int, now: float, certificate: Certified | None = None) -> Peer:
        """A new connection; it has a while to say Hello."""
        peer = Peer(peer_id, now + self._interval, now + self._settings.hello, now, certificate=certificate)
        self._peers[peer_id] = peer
        return peer

    def remove(self, peer: Peer) -> None:
        """A connection is gone."""
        self._peers.pop(peer.id, None)

    def heard(self, peer: Peer) -> None:
        """It said something."""
        if peer.known is not None:
            peer.deadline, peer.frozen = None, False

    def node(self, name: str) -> Peer | None:
        """The aggregator or parameter server of this name."""
        return next((p for p in self if p.hello and p.hello.role != "worker" and p.hello.name == name), None)

    def worker(self, job: int, name: str) -> Peer | None:
        """The worker host of this name in a job."""
        return next((p for p in self if p.hello and p.job == job and p.hello.name == name), None)

    def registered(self, name: str) -> Peer | None:
        """The connection on which a node is registered."""
        return next((p for p in self if p.card and p.card.name == name), None)

    def serves(self, name: str) -> bool:
        """Whether a node of this name is here for some job, beside its registration."""
        return any(p.hello is not None and p.hello.name == name for p in self)

    def nodes(self) -> dict[str, Hello]:
        """Connected aggregators and parameter servers."""
        return {peer.hello.name: peer.hello for peer in self if peer.hello and peer.hello.role != "worker"}

    def ping(self, peer: Peer, now: float, patience: float) -> Ping:
        """The next ping for a peer, to be answered within ``patience`` seconds."""
        peer.nonce += 1
        peer.next_ping = now + self._interval
        if peer.deadline is None:
            peer.asked, peer.deadline = now, now + patience
        peer.deadline = min(peer.deadline, now + patience)
        return Ping(nonce=peer.nonce)

    def excuse(self, seconds: float) -> None:
        """This process itself was not running for so long: nobody is to blame for not being heard."""
        for peer in self:
            if peer.deadline is not None:
                peer.deadline += seconds

    def timer(self) -> float | None:
        """When a ping or a deadline is due."""
        times = [peer.deadline for peer in self if peer.deadline is not None]
        times += [peer.next_ping for peer in self if peer.known is not None]
        return min(times, default=None)
