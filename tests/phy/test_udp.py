"""The UDP device on loopback."""

import errno
import select
import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
from pyroute2 import IPRoute

from inanet.phy import udp
from inanet.phy.device import receive_window
from inanet.phy.interface import interface_of, is_hardware, merges
from inanet.phy.mmsg import SOL_UDP, UDP_SEGMENT, SendTable
from inanet.phy.udp import FRAGMENTS, TRUESIZE, UdpDevice
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import address_of, endpoint
from inanet.wire.xagg import CONTROL_BYTES, ROW_BYTES
from tests.phy.helpers import DEADLINE, ScriptedDevice, carry, closed_port, contents, numbered, read_until

OpenUdp = Callable[..., UdpDevice]
ROW = 1052
SO_NO_CHECK = 11
IP_RECVERR = 11


def rows(destination: int, count: int, length: int = ROW) -> Transmission:
    return Transmission(
        destination, numbered(count, length), np.arange(count, dtype=np.int64) * length, length
    )


@pytest.mark.parametrize("length", [1, 3, 4, 36, 156, 1052, 1400, 8999, 32753, 32754, 65507])
@pytest.mark.parametrize("count", [1, 2, 61, 63, 65])
def test_round_trip(open_udp: OpenUdp, length: int, count: int) -> None:
    sender, receiver = open_udp(), open_udp()
    assert carry(sender, receiver, rows(receiver.endpoint, count, length)) == count


def test_round_trip_of_many_super_frames(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    carry(sender, receiver, rows(receiver.endpoint, 2500))
    sent, received = sender.counters(), receiver.counters()
    assert sent["tx_packets"] == received["rx_packets"] == 2500
    assert sent["tx_bytes"] == received["rx_bytes"] == 2500 * ROW
    # segmentation is at work both ways: far fewer messages than packets
    assert sent["tx_superframes"] == received["rx_superframes"] <= 2500 // 40
    assert sent["segmentation_refused"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_packets_scattered_over_the_arena(open_udp: OpenUdp, seed: int) -> None:
    sender, receiver = open_udp(), open_udp()
    rng = np.random.default_rng(seed)
    pieces = [np.arange(first, first + rng.integers(1, 9)) for first in rng.integers(0, 900, 150)]
    offsets = np.concatenate(pieces).astype(np.int64) * ROW + 4 * int(rng.integers(0, 3))
    transmission = Transmission(receiver.endpoint, numbered(920, ROW, seed), offsets, ROW)
    assert carry(sender, receiver, transmission) == len(offsets)


def test_both_directions_and_several_senders(open_udp: OpenUdp) -> None:
    hub, leaves = open_udp(), [open_udp() for _ in range(3)]
    for leaf in leaves:
        assert leaf.send(rows(hub.endpoint, 70)) == 70
    got = read_until(hub, 210)
    assert {source for source, _ in got} == {leaf.endpoint for leaf in leaves}
    for leaf in leaves:
        own = [packet for source, packet in got if source == leaf.endpoint]
        assert own == contents(rows(hub.endpoint, 70))
        carry(hub, leaf, rows(leaf.endpoint, 70))


def test_packets_of_fragment_size_are_aligned(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    sender.send(rows(receiver.endpoint, 130))
    seen = 0
    while seen < 130:
        batch = receiver.receive()
        if batch is not None:
            seen += len(batch)
            assert not (batch.offsets % 4).any()


def test_a_foreign_super_frame_with_a_short_tail(open_udp: OpenUdp) -> None:
    receiver = open_udp()
    message = numbered(1, 5 * 700 + 123).tobytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendmsg(
            [message],
            [(SOL_UDP, UDP_SEGMENT, struct.pack("=H", 700))],
            0,
            address_of(receiver.endpoint),
        )
        got = read_until(receiver, 6)
        assert {source for source, _ in got} == {endpoint("127.0.0.1", other.getsockname()[1])}
    assert [packet for _, packet in got] == [message[at : at + 700] for at in range(0, len(message), 700)]
    assert receiver.counters()["rx_superframes"] == 1


def test_datagrams_of_any_size_in_one_batch(open_udp: OpenUdp) -> None:
    receiver = open_udp()
    packets = [numbered(1, size, size).tobytes() for size in (0, 1, 1052, 0, 7, 30000, 2)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for packet in packets:
            other.sendto(packet, address_of(receiver.endpoint))
        assert [packet for _, packet in read_until(receiver, len(packets))] == packets


def test_start_skips_what_was_taken(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    transmission = rows(receiver.endpoint, 100)
    assert sender.send(transmission, 60) == 40
    assert [packet for _, packet in read_until(receiver, 40)] == contents(transmission)[60:]
    assert sender.send(transmission, 100) == 0


def test_a_full_send_buffer_stops_between_super_frames(
    open_udp: OpenUdp, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = open_udp(), open_udp()
    send, room = SendTable.send, [2]

    def limited(table: SendTable, fd: int, first: int, messages: int) -> int:
        if room[0] == 0:
            return -errno.EAGAIN
        sent = send(table, fd, first, min(messages, first + room[0]))
        room[0] -= sent
        return sent

    monkeypatch.setattr(SendTable, "send", limited)
    transmission = rows(receiver.endpoint, 200)
    assert sender.send(transmission) == 124
    assert sender.send(transmission, 124) == 0
    room[0] = 9
    assert sender.send(transmission, 124) == 76
    assert sender.counters()["eagain"] == 2
    assert [packet for _, packet in read_until(receiver, 200)] == contents(transmission)


@pytest.mark.privileged("a namespace with a slow loopback")
def test_a_slow_link_blocks_the_sender_and_loses_nothing(
    in_namespace: Callable[[Callable[[], None]], None], open_udp: OpenUdp
) -> None:
    def inside() -> None:
        with IPRoute() as netlink:
            lo = netlink.link_lookup(ifname="lo")[0]
            netlink.link("set", index=lo, state="up")
            netlink.tc("add", "tbf", index=lo, handle=0x10000, rate=25_000_000, burst=140_000, latency="10s")
        sender, receiver = open_udp(sndbuf=4096), open_udp()
        transmission = rows(receiver.endpoint, 1500)
        got: list[bytes] = []
        taken = 0
        end = time.monotonic() + DEADLINE
        while len(got) < 1500 and time.monotonic() < end:
            taken += sender.send(transmission, taken)
            got += contents(receiver.receive())
        assert sender.counters()["eagain"] > 0
        assert got == contents(transmission)

    in_namespace(inside)


@pytest.mark.privileged("a namespace with a small MTU")
def test_a_packet_above_the_mtu_is_refused_with_both_figures(
    in_namespace: Callable[[Callable[[], None]], None], open_udp: OpenUdp
) -> None:
    def inside() -> None:
        with IPRoute() as netlink:
            lo = netlink.link_lookup(ifname="lo")[0]
            netlink.link("set", index=lo, state="up", mtu=1000)
        sender, receiver = open_udp(), open_udp()
        with pytest.raises(
            OSError, match=r"need an MTU of 1080 B; the path to 127\.0\.0\.1:\d+ has 1000"
        ) as e:
            sender.send(rows(receiver.endpoint, 3))
        assert e.value.errno == errno.EMSGSIZE
        # the device is as good as before, and segmentation was not given up for it
        carry(sender, receiver, rows(receiver.endpoint, 100, 900))
        assert sender.counters()["segmentation_refused"] == 0

    in_namespace(inside)


def test_a_packet_no_datagram_can_hold_is_refused(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    with pytest.raises(OSError, match="packets of 65508 B") as caught:
        sender.send(rows(receiver.endpoint, 1, 65508))
    assert caught.value.errno == errno.EMSGSIZE


def test_without_segmentation_plain_datagrams_are_sent(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    # the kernel refuses to segment what has no checksum
    sender._socket.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
    carry(sender, receiver, rows(receiver.endpoint, 300))
    counters = sender.counters()
    assert counters["segmentation_refused"] == 1
    assert counters["tx_superframes"] == counters["tx_packets"] == 300


def test_a_dead_peer_does_not_disturb_the_others(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    sender._socket.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
    gone = closed_port()
    for _ in range(3):
        assert sender.send(rows(gone, 70)) == 70
    assert sender.receive() is None
    carry(sender, receiver, rows(receiver.endpoint, 70))
    assert sender.counters()["path_errors"] > 0


@pytest.mark.parametrize(
    "nobody", [endpoint("127.0.0.1", 0), endpoint("255.255.255.255", 9), endpoint("240.0.0.1", 9)]
)
@pytest.mark.parametrize("count", [1, 130])
def test_an_address_that_nobody_can_have_costs_its_packets_only(
    open_udp: OpenUdp, nobody: int, count: int
) -> None:
    sender, receiver = open_udp(), open_udp()
    assert sender.send(rows(nobody, count)) == count
    assert sender.counters()["path_errors"] >= min(count, 2)
    carry(sender, receiver, rows(receiver.endpoint, 70))
    assert sender.counters()["segmentation_refused"] == 0


def test_an_answer_to_an_earlier_packet_costs_the_next_one_nothing(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp()
    sender._socket.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
    sender.send(rows(closed_port(), 1))
    poll = select.poll()
    poll.register(sender.fileno(), select.POLLERR)
    assert poll.poll(DEADLINE * 1000)
    carry(sender, receiver, rows(receiver.endpoint, 70))
    assert sender.counters()["path_errors"] == 1


def test_a_super_frame_without_a_path_is_lost_and_the_rest_goes_on(
    open_udp: OpenUdp, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = open_udp(), open_udp()
    send = SendTable.send

    def without_path_for_the_second(table: SendTable, fd: int, first: int, messages: int) -> int:
        if first == 1:
            return -errno.ENETUNREACH
        return send(table, fd, first, first + 1)

    monkeypatch.setattr(SendTable, "send", without_path_for_the_second)
    transmission = rows(receiver.endpoint, 200)
    assert sender.send(transmission) == 200
    packets = contents(transmission)
    assert [packet for _, packet in read_until(receiver, 138)] == packets[:62] + packets[124:]
    assert sender.counters()["path_errors"] == 2


def test_kernel_drops_are_counted(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp(rcvbuf=1)
    assert receiver.counters()["kernel_overflow"] == 0
    assert sender.send(rows(receiver.endpoint, 62 * 8)) == 62 * 8
    end = time.monotonic() + DEADLINE
    got = 0
    while got // 62 + receiver.counters()["kernel_overflow"] < 8:
        got += len(contents(receiver.receive()))
        assert time.monotonic() < end
    assert receiver.counters()["kernel_overflow"] > 0
    assert got % 62 == 0
    receiver.close()
    assert receiver.counters()["kernel_overflow"] > 0


def test_budget_holds_what_it_promises(open_udp: OpenUdp) -> None:
    sender, receiver = open_udp(), open_udp(rcvbuf=212_992)
    assert receiver.rcvbuf == 2 * 212_992
    assert receiver.rx_budget == 2 * 212_992 // TRUESIZE * FRAGMENTS == 6 * 62
    budget = receiver.rx_budget
    assert sender.send(rows(receiver.endpoint, budget)) == budget
    read_until(receiver, budget)
    assert receiver.counters()["kernel_overflow"] == 0
    assert open_udp(rcvbuf=1).rx_budget == FRAGMENTS


@pytest.mark.parametrize("rcvbuf", [212_992, 1 << 20])
def test_a_window_of_lone_packets_fits_the_buffer(open_udp: OpenUdp, rcvbuf: int) -> None:
    """Half of a budget did not: without segmentation offload, buffers overflowed although nothing was lost on the way."""
    receiver = open_udp(rcvbuf=rcvbuf)
    window = receive_window(receiver)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(window):
            sender.sendto(bytes(ROW_BYTES), address_of(receiver.endpoint))
        for _ in range(window // 32):
            sender.sendto(bytes(CONTROL_BYTES), address_of(receiver.endpoint))
    assert receiver.counters()["kernel_overflow"] == 0
    assert window * 2304 > 0.75 * receiver.rcvbuf


def test_binds_loopback_and_reports_the_port(open_udp: OpenUdp) -> None:
    device = open_udp()
    address, port = address_of(device.endpoint)
    assert address == "127.0.0.1"
    assert port > 0
    with pytest.raises(
        OSError, match=rf"cannot bind UDP 127\.0\.0\.1:{port}: Address already in use"
    ) as caught:
        UdpDevice("127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE


def test_closing(open_udp: OpenUdp) -> None:
    device = open_udp()
    descriptor = device.fileno()
    assert descriptor >= 0
    assert device.timer() is None
    assert device.flush(0.0) is None
    device.close()
    device.close()
    assert device.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        device.receive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        device.send(rows(closed_port(), 1))


def receive_all(device: UdpDevice, descriptors: list[int], count: int) -> list[tuple[int, bytes]]:
    """As read_until, watching several descriptors."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    got: list[tuple[int, bytes]] = []
    while len(got) < count:
        assert poll.poll(DEADLINE * 1000), f"{len(got)} of {count}: {device.counters()}"
        while (batch := device.receive()) is not None:
            got += zip(map(int, batch.sources), contents(batch), strict=True)
    return got


def test_groups_and_own_packets_come_in_one_stream(open_udp: OpenUdp) -> None:
    members = [open_udp(), open_udp()]
    parent, other = open_udp(), open_udp()
    group = free_group()
    joined = [member.join(group) for member in members]
    assert [member.join(group) for member in members] == joined
    down, direct = rows(group, 150), numbered(70, 36, 9)
    assert parent.send(down) == 150
    for member in members:
        repairs = Transmission(member.endpoint, direct, np.arange(70, dtype=np.int64) * 36, 36)
        assert other.send(repairs) == parent.send(repairs) == 70
    for member, descriptor in zip(members, joined, strict=True):
        got = receive_all(member, [member.fileno(), descriptor], 290)
        assert member.receive() is None
        # super-frames arrive as such, and who sent a packet is known whatever it was sent to
        assert [p for source, p in got if source == parent.endpoint and len(p) == ROW] == contents(down)
        assert sum(source == parent.endpoint for source, _ in got) == 220
        assert sum(source == other.endpoint for source, _ in got) == 70
        assert member.counters()["rx_superframes"] == 3 + 2 + 2
        assert member.counters()["rx_packets"] == 290
    # the down direction left once, however many members there are
    assert parent.counters()["tx_superframes"] == 3 + 2 * 2


def test_after_leaving_a_group_nothing_more_comes_of_it(open_udp: OpenUdp) -> None:
    member, stays, sender, group = open_udp(), open_udp(), open_udp(), free_group()
    member.join(group)
    descriptor = stays.join(group)
    member.leave(group)
    assert sender.send(rows(group, 10)) == 10
    assert len(receive_all(stays, [descriptor], 10)) == 10
    assert member.receive() is None
    carry(sender, member, rows(member.endpoint, 10))
    with pytest.raises(KeyError):
        member.leave(group)


def test_drops_of_a_group_are_counted(open_udp: OpenUdp) -> None:
    member, sender, group = open_udp(rcvbuf=1), open_udp(), free_group()
    descriptor = member.join(group)
    assert sender.send(rows(group, 62 * 8)) == 62 * 8
    arrived = len(receive_all(member, [descriptor], 62))
    lost = 8 - arrived // 62
    assert member.counters()["kernel_overflow"] == lost > 0
    member.leave(group)
    assert member.counters()["kernel_overflow"] == lost
    member.close()
    assert member.counters()["kernel_overflow"] == lost


def test_what_is_no_group_cannot_be_joined(open_udp: OpenUdp) -> None:
    device = open_udp()
    for address in ("127.0.0.1", "223.255.255.255", "240.0.0.0"):
        with pytest.raises(ValueError, match="is not a multicast group"):
            device.join(endpoint(address, 7000))


def free_group() -> int:
    """A group endpoint with a port that nobody uses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("239.255.73.1", 0))
        return endpoint(*probe.getsockname())


def test_decorators_pass_groups_on(open_udp: OpenUdp) -> None:
    wrapped = Wrapper(open_udp())
    group = free_group()
    assert wrapped.join(group) is not None
    wrapped.leave(group)
    with pytest.raises(OSError, match=r"ScriptedDevice at 127\.0\.0\.1:7000 cannot receive the group 239\."):
        Wrapper(ScriptedDevice()).join(group)


@pytest.mark.parametrize(
    ("hardware", "merges", "refused"), [(True, False, 1), (True, True, 0), (True, None, 0), (False, False, 0)]
)
def test_interface_that_does_not_merge_is_counted(
    open_udp: OpenUdp, monkeypatch: pytest.MonkeyPatch, hardware: bool, merges: bool | None, refused: int
) -> None:
    monkeypatch.setattr(udp, "is_hardware", lambda name: hardware and name == "lo")
    monkeypatch.setattr(udp, "merges", lambda *_: merges)
    assert open_udp().counters()["interface_merging_refused"] == refused


def test_interface_is_found_by_its_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert interface_of("127.0.0.1") == "lo"
        assert interface_of("192.0.2.1") == ""
        assert merges(sock, "lo") in (True, False)
        assert merges(sock, "none") is None
    assert not is_hardware("lo")
