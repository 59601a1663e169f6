"""Who has been told the key of a job: on the day a certificate is revoked, the jobs whose key it has seen get another.

What counts is the certificate and not the connection: a node that went before it was revoked has the key as well. Whom an
earlier coordinator has told, nobody knows; jobs that outlive it get another key in any case.
"""

from collections.abc import Collection, Iterable

from inanet.messages.control import Message, Plan
from inanet.trust.certificates import Certified


class Keyholders:
    """Certificates by key. Connections without one, which no list of revoked certificates is about, are not noted."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, Certified]] = {}

    def told(self, certificate: Certified | None, message: Message) -> None:
        """A message is sent to whoever has this certificate: a plan has the key of its job."""
        if certificate is not None and isinstance(message, Plan):
            self._known.setdefault(message.plan.key, {})[certificate.serial] = certificate

    def of(self, key: int) -> Iterable[Certified]:
        """Who knows a key."""
        return tuple(self._known.get(key, {}).values())

    def keep(self, keys: Collection[int]) -> None:
        """Forget all keys but these."""
        self._known = {key: known for key, known in self._known.items() if key in keys}
