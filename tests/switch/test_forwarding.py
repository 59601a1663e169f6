"""Forwarding tables in virtual time: hardware addresses, routes, what is for the switch itself, queues of ordinary frames."""

import struct
from ipaddress import IPv4Address, IPv4Network

from inanet.phy.vnet import HEADER_BYTES
from inanet.switch import tables
from tests.switch.adder import packet
from tests.switch.memory import Parsed, ethernet, internet_checksum, ipv4, udp
from tests.switch.rig import (
    BROADCAST,
    HOSTS,
    MACS,
    ONES,
    OWN,
    OWN_MAC,
    PORT,
    SWITCH,
    WORKERS,
    Bench,
    arp,
)


def test_frames_are_flooded_until_their_destination_is_known() -> None:
    bench = Bench(known=False)
    there = ethernet(MACS[1], MACS[0], 0x88B5, b"hello")
    back = ethernet(MACS[0], MACS[1], 0x88B5, b"there")
    assert bench.put(0, [there]) == [[], [there], [there]]
    assert bench.put(1, [back]) == [[back], [], []]
    assert bench.put(0, [there, there]) == [[], [there, there], []]
    # one behind the port it comes from has heard it already
    assert bench.put(1, [there]) == [[], [], []]
    assert bench.drops == {"no_route": 1}
    everybody = ethernet(BROADCAST, MACS[0], 0x88B5, b"all")
    assert bench.put(0, [everybody, there]) == [[], [everybody, there], [everybody]]


def test_learned_addresses_are_forgotten_and_given_ones_are_not() -> None:
    bench = Bench(known=False)
    bench.tables.give_hardware(MACS[2], 2)
    bench.put(1, [ethernet(BROADCAST, MACS[1], 0x88B5, b"")])
    # somebody else claims the given address
    bench.put(1, [ethernet(BROADCAST, MACS[2], 0x88B5, b"")])
    later = tables.MAX_AGE + 1
    learned = ethernet(MACS[1], MACS[0], 0x88B5, b"x")
    given = ethernet(MACS[2], MACS[0], 0x88B5, b"y")
    assert bench.put(0, [learned], 1.0) == [[], [learned], []]
    assert bench.put(0, [learned, given], later) == [[], [learned], [learned, given]]


def test_more_addresses_than_places_push_out_the_oldest() -> None:
    bench = Bench(known=False)
    for first in range(0, 3 * tables.PLACES, 64):
        sources = [0x02_00_00_01_00_00 + first + i for i in range(64)]
        bench.put(0, [ethernet(BROADCAST, source, 0x88B5, b"") for source in sources], float(first))
    newest = 0x02_00_00_01_00_00 + 3 * tables.PLACES - 1
    frame = ethernet(newest, MACS[1], 0x88B5, b"x")
    assert bench.put(1, [frame], float(3 * tables.PLACES)) == [[frame], [], []]


def test_frames_to_the_switchs_hardware_are_routed() -> None:
    bench = Bench()
    bench.tables.set_routes([(IPv4Network("10.9.0.0/16"), 1, int(IPv4Address(HOSTS[1])))])
    packets = [
        ipv4(HOSTS[0], "10.9.1.1", 6, b"payload"),
        ipv4(HOSTS[0], HOSTS[2], 6, b"payload", ttl=2),
        ipv4(HOSTS[0], HOSTS[2], 6, b"payload", ttl=1),
        ipv4(HOSTS[0], "10.0.0.77", 6, b"payload"),
    ]
    sent = bench.put(0, [ethernet(OWN_MAC, MACS[0], 0x0800, one) for one in packets])
    assert sent == [
        [],
        [ethernet(MACS[1], OWN_MAC, 0x0800, ipv4(HOSTS[0], "10.9.1.1", 6, b"payload", ttl=63))],
        [ethernet(MACS[2], OWN_MAC, 0x0800, ipv4(HOSTS[0], HOSTS[2], 6, b"payload", ttl=1))],
    ]
    assert bench.drops == {"ttl_expired": 1, "no_route": 1}


def test_a_tun_switch_routes_by_address() -> None:
    bench = Bench(link=0)
    frame = bytes(HEADER_BYTES) + ipv4(HOSTS[0], HOSTS[1], 6, b"payload")
    expected = bytes(HEADER_BYTES) + ipv4(HOSTS[0], HOSTS[1], 6, b"payload", ttl=63)
    assert bench.put(0, [frame]) == [[], [expected], []]
    stray = bytes(HEADER_BYTES) + ipv4(HOSTS[0], HOSTS[0], 6, b"")
    assert bench.put(0, [stray, bytes(HEADER_BYTES) + b"\x60" + bytes(60), b"short" * 3]) == [[], [], []]
    assert bench.drops == {"no_route": 2, "short": 1}
    for worker in range(2):
        frame = udp(0, 0, WORKERS[worker], SWITCH, [packet(s, worker, 1, ONES) for s in range(9)], link=False)
        out = bench.put(worker, [frame])
    for port, member in ((0, WORKERS[0]), (1, WORKERS[1])):
        (one,) = (Parsed(frame, link=False) for frame in out[port])
        assert (one.address, one.port, one.aim) == (OWN, PORT, member & 0xFFFF)
        assert one.packets == [packet(s, 1, 1, ONES * 2) for s in range(9)]


def test_the_switch_answers_for_its_address_and_passes_other_questions_on() -> None:
    bench = Bench(known=False)
    (answer,), *others = bench.put(0, [ethernet(BROADCAST, MACS[0], 0x0806, arp(1, MACS[0], HOSTS[0], OWN))])
    assert others == [[], []]
    assert answer[HEADER_BYTES:][:14] == ethernet(MACS[0], OWN_MAC, 0x0806, b"")[HEADER_BYTES:]
    assert answer[HEADER_BYTES + 20 :][:12] == b"\0\2" + OWN_MAC.to_bytes(6, "big") + IPv4Address(OWN).packed
    question = ethernet(BROADCAST, MACS[1], 0x0806, arp(1, MACS[1], HOSTS[1], HOSTS[0]))
    assert bench.put(1, [question]) == [[question], [], [question]]
    reply = ethernet(MACS[1], MACS[0], 0x0806, arp(2, MACS[0], HOSTS[0], HOSTS[1]))
    assert bench.put(0, [reply]) == [[], [reply], []]
    assert bench.tables.host(int(IPv4Address(HOSTS[1]))) == (MACS[1], 1)


def test_the_switch_answers_pings() -> None:
    message = struct.pack(">BBHHH", 8, 0, 0, 5, 1) + b"some payload"
    message = message[:2] + internet_checksum(message).to_bytes(2, "big") + message[4:]
    bench = Bench()
    out = bench.put(1, [ethernet(OWN_MAC, MACS[1], 0x0800, ipv4(HOSTS[1], OWN, 1, message, ttl=3))])
    assert (out[0], out[2]) == ([], [])
    (answer,) = out[1]
    ip = answer[HEADER_BYTES + 14 :]
    assert answer[HEADER_BYTES:][:12] == MACS[1].to_bytes(6, "big") + OWN_MAC.to_bytes(6, "big")
    assert (ip[8], ip[12:20]) == (64, IPv4Address(OWN).packed + IPv4Address(HOSTS[1]).packed)
    assert internet_checksum(ip[:20]) == internet_checksum(ip[20:]) == 0
    assert (ip[20], ip[24:]) == (0, message[4:])
