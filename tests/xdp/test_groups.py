"""Several sockets of one host in one multicast group: none loses to the program what another one's worker takes."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from inanet.phy.udp import UdpDevice
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import address_of, endpoint
from inanet.xdp.attach import Attachment
from inanet.xdp.inbox import InboxCount
from inanet.xdp.worker import InboxDevice
from tests.phy.helpers import read_until
from tests.phy.spaces import Space, cable, open_spaces
from tests.xdp.conftest import PARENT, OpenInbox
from tests.xdp.results import GROUP, JOB, KEY, packet

pytestmark = pytest.mark.privileged("loads BPF programs and makes network namespaces")

OTHER_GROUP = endpoint("239.192.0.10", 7402)


class Host:
    """Two workers on one host, the first one with the program on the only interface; and their parent."""

    def __init__(self, stack: ExitStack, space: Space, parent: UdpDevice, open_inbox: OpenInbox) -> None:
        def device() -> UdpDevice:
            return stack.enter_context(closing(UdpDevice("10.9.0.1")))

        self._space, self._parent = space, parent
        inner, self.other = space.run(device), space.run(device)
        self.inbox = open_inbox(64, inner.endpoint)
        self.inbox.follow({(PARENT, JOB): KEY})
        self.device = InboxDevice(inner, self.inbox)
        stack.callback(self.device.close)
        held = space.run(lambda: Attachment(self.inbox, "left", "generic"))
        stack.callback(held.close)

    def join(self, device: UdpDevice | InboxDevice, group: int) -> None:
        """In the host's namespace."""
        self._space.run(lambda: device.join(group))

    def send(self, group: int, fragment: int) -> bytes:
        """A result from the parent to a group."""
        data = packet(fragment)
        payload = np.frombuffer(data, np.uint8).copy()
        assert self._parent.send(Transmission(group, payload, np.zeros(1, np.int64), len(data))) == 1
        return data

    def taken(self) -> int:
        """Results that came through the ring."""
        return int(self.inbox.counts()[InboxCount.TAKEN])


@pytest.fixture
def host(open_inbox: OpenInbox) -> Iterator[Host]:
    """At 10.9.0.1."""
    with ExitStack() as stack:
        one, other = open_spaces(stack, 2)
        cable(one, "left", other, "right", "10.9.0.1", "10.9.0.2")
        parent = stack.enter_context(closing(other.run(lambda: UdpDevice(*address_of(PARENT)))))
        yield Host(stack, one, parent, open_inbox)


def test_the_program_leaves_a_group_that_others_hear_to_the_sockets(host: Host) -> None:
    host.join(host.other, GROUP)
    host.join(host.device, GROUP)
    data = host.send(GROUP, 1)
    for device in (host.other, host.device):
        assert read_until(device, 1) == [(PARENT, data)]
    assert host.taken() == 0


def test_nobody_can_come_into_a_group_that_the_program_takes(host: Host) -> None:
    host.join(host.device, GROUP)
    with pytest.raises(OSError, match=r"cannot join 239\.192\.0\.9:7401"):
        host.join(host.other, GROUP)
    data = host.send(GROUP, 1)
    assert read_until(host.device, 1) == [(PARENT, data)]
    assert host.taken() == 1
    # another group is another matter, and one that was left is free
    host.join(host.other, OTHER_GROUP)
    host.device.leave(GROUP)
    host.join(host.other, GROUP)
    host.join(host.device, GROUP)
    host.join(host.device, GROUP)
    data = host.send(GROUP, 2)
    for device in (host.other, host.device):
        assert read_until(device, 1) == [(PARENT, data)]
    assert host.taken() == 1


def test_groups_are_shared_once_the_program_is_off(host: Host) -> None:
    host.join(host.device, GROUP)
    host.device.share_groups()
    host.join(host.other, GROUP)
    data = host.send(GROUP, 1)
    for device in (host.other, host.device):
        assert read_until(device, 1) == [(PARENT, data)]
