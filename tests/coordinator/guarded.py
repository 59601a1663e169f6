"""A coordinator's nodes with certificates, and the list of those that were revoked."""

from inanet.trust.certificates import Certified
from tests.coordinator.nodes import Nodes


class Guarded(Nodes):
    """Everybody has a certificate, with its own name as the serial number. ``revoked`` is the list."""

    def __init__(self, **settings: float) -> None:
        self.revoked: set[str] = set()
        self.serials: dict[str, str] = {}
        super().__init__(**settings)

    def connect(self, name: str, certificate: Certified) -> None:
        """A connection on which nothing was said yet."""
        self.ids[name], self.inbox[name] = next(self._next_id), []
        self.mute.discard(name)
        self.coordinator.connected(self.ids[name], self.now, certificate)

    def join(self, *names: str, **changes: object) -> None:
        for name in names:
            hello = self.hello(name, **changes)
            serial = self.serials.get(name, name)
            self.connect(name, Certified(frozenset([name]), frozenset([hello.role]), serial=serial))
            self.say(name, hello)

    def withdrawn(self, certificate: Certified | None) -> str:
        gone = certificate is not None and certificate.serial in self.revoked
        return f"the certificate of {certificate.serial} was revoked" if certificate and gone else ""

    def revoke(self, *serials: str) -> None:
        self.revoked |= {*serials}
        self.coordinator.recheck(self.withdrawn, self.now)
        self.pump()

    @property
    def keys(self) -> set[int]:
        """Of the plans that connected nodes follow."""
        return {plan.key for name, plan in self.plans.items() if name in self.ids}
