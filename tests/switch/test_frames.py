"""Packets of programs in frames, in virtual time: rebuilt super-frames, marks, raw frames, faults, damage."""

import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.phy.vnet import HEADER_BYTES
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.tenants import Tenant
from inanet.switch import parse
from inanet.switch.framed import FrameSwitch
from inanet.switch.pipeline import Pipeline
from inanet.switch.port import Faults, PortOptions
from inanet.switch.programs import Registration
from inanet.wire.endpoint import endpoint
from inanet.wire.switchml import Packet as Contribution
from tests.switch.adder import GROUP, HEADER, Adder, packet
from tests.switch.memory import Parsed, ethernet, internet_checksum, ipv4, udp
from tests.switch.rig import (
    BROADCAST,
    HOSTS,
    MACS,
    ONES,
    OWN,
    OWN_MAC,
    PORT,
    PS,
    SWITCH,
    WORKERS,
    Bench,
    arp,
    from_worker,
)


def test_results_are_rebuilt_into_super_frames_from_the_switch() -> None:
    bench = Bench(adder={"slots": 400})
    first = [packet(slot, 0, 1, ONES * slot) for slot in range(300)]
    second = [packet(slot, 1, 1, ONES) for slot in range(300)]
    assert bench.put(0, [from_worker(0, first[i : i + 60]) for i in range(0, 300, 60)]) == [[], [], []]
    out = bench.put(1, [from_worker(1, second[i : i + 60]) for i in range(0, 300, 60)])
    assert out[2] == []
    for port in (0, 1):
        frames = [Parsed(frame) for frame in out[port]]
        assert [len(one.packets) for one in frames] == [128, 128, 44]
        assert [got for one in frames for got in one.packets] == [
            packet(slot, 1, 1, ONES * (slot + 1)) for slot in range(300)
        ]
        for one in frames:
            assert (one.to, one.hardware) == (MACS[port], OWN_MAC)
            assert (one.address, one.port) == (OWN, PORT)
            assert (one.target, one.aim) == (HOSTS[port], WORKERS[port] & 0xFFFF)


def test_what_a_program_lets_pass_leaves_as_it_came() -> None:
    bench = Bench()
    beyond = [packet(100 + i, 0, 1, ONES) for i in range(20)]
    mixed = [beyond[0], packet(1, 0, 1, ONES), *beyond[1:]]
    out = bench.put(0, [from_worker(0, mixed, PS, tos=2)])
    assert out[:2] == [[], []]
    (one,) = map(Parsed, out[2])
    assert one.packets == beyond
    assert (one.to, one.hardware, one.tos, one.ttl) == (MACS[2], MACS[0], 2, 64)
    assert (one.address, one.port, one.target, one.aim) == (HOSTS[0], 5001, HOSTS[2], PORT)


def test_different_flows_and_services_are_not_mixed() -> None:
    bench = Bench()
    frames = [
        from_worker(0, [packet(100, 0, 1, ONES)], PS, tos=0),
        from_worker(0, [packet(101, 0, 1, ONES)], PS, tos=4),
        from_worker(0, [packet(102, 0, 1, ONES)], endpoint(HOSTS[2], PORT + 1), tos=0),
        from_worker(0, [packet(103, 0, 1, ONES)], PS, tos=0),
    ]
    out = bench.put(0, frames)
    found = [(one.tos, one.aim, [p[0] for p in one.packets]) for one in map(Parsed, out[2])]
    assert found == [(0, PORT, [100, 103]), (4, PORT, [101]), (0, PORT + 1, [102])]


def test_other_datagrams_pass_untouched() -> None:
    bench = Bench()
    frames = [
        udp(MACS[2], MACS[0], WORKERS[0], endpoint(HOSTS[2], 47_999), [b"x" * 100] * 30),
        udp(MACS[2], MACS[0], WORKERS[0], endpoint(HOSTS[2], PORT + 16), [b"y" * 100]),
        ethernet(MACS[2], MACS[0], 0x0800, ipv4(HOSTS[0], HOSTS[2], 6, b"z" * 40)),
    ]
    assert bench.put(0, list(frames)) == [[], [], frames]


def test_damaged_and_foreign_frames_are_refused() -> None:
    bench = Bench()
    whole = bytearray(from_worker(0, [packet(1, 0, 1, ONES)]))
    # nobody promises that the checksum is right, and it is not
    whole[0] = 0
    whole[HEADER_BYTES + 14 + 26] ^= 0x55
    short = bytearray(from_worker(0, [packet(2, 0, 1, ONES)]))
    short[HEADER_BYTES + 14 + 24 : HEADER_BYTES + 14 + 26] = (5000).to_bytes(2, "big")
    stranger = udp(OWN_MAC, MACS[0], endpoint(HOSTS[0], 5003), SWITCH, [packet(1, 0, 1, ONES)] * 7)
    assert bench.put(0, [bytes(whole), bytes(short), stranger]) == [[], [], []]
    assert bench.drops == {"bad_checksum": 1, "short": 1, "foreign_host": 7}
    assert not bench.adder.bitmap.any()


def test_a_right_checksum_is_accepted() -> None:
    bench = Bench()
    frame = bytearray(from_worker(0, [packet(1, 0, 1, ONES)]))
    frame[0] = 0
    ip = HEADER_BYTES + 14
    datagram = bytes(frame[ip + 20 :])
    pseudo = bytes(frame[ip + 12 : ip + 20]) + struct.pack(">HH", 17, len(datagram))
    frame[ip + 26 : ip + 28] = internet_checksum(pseudo + datagram).to_bytes(2, "big")
    bench.put(0, [bytes(frame)])
    assert bench.adder.bitmap[1] == 1


def test_fragments_are_marked_and_dropped_by_their_place_in_the_queue() -> None:
    size = 42 + HEADER.size + 64
    narrow = PortOptions(rate=8e6, depth=60 * size, ecn=40 * size)
    bench = Bench(options={"p2": narrow})
    beyond = [packet(100 + i, 0, 1, ONES) for i in range(64)]
    out = [Parsed(frame) for frame in bench.put(0, [from_worker(0, beyond, PS)])[2]]
    assert [(one.tos & 3, one.packets) for one in out] == [(0, beyond[:40]), (3, beyond[40:60])]
    assert bench.drops == {"queue_full": 4}
    assert bench.adder.congested == [0] * 64
    # ten have left; now the program is told as well
    out = [Parsed(f) for f in bench.put(0, [from_worker(0, beyond[:5], PS)], 10 * size / 1e6)[2]]
    assert [(one.tos & 3, one.packets) for one in out] == [(3, beyond[:5])]
    assert bench.adder.congested[64:] == [1] * 5
    # packets that come marked stay marked, and say so
    out = [Parsed(f) for f in bench.put(0, [from_worker(0, beyond[:2], PS, tos=3)], 100.0)[2]]
    assert [one.tos for one in out] == [3]
    assert bench.adder.congested[69:] == [1] * 2


def test_ordinary_frames_are_marked_where_their_sender_understands_it() -> None:
    frame = {
        tos: ethernet(MACS[2], MACS[0], 0x0800, ipv4(HOSTS[0], HOSTS[2], 6, b"z" * 40, tos))
        for tos in range(4)
    }
    size = len(frame[0]) - HEADER_BYTES
    bench = Bench(options={"p2": PortOptions(rate=8, depth=6 * size, ecn=2 * size)})
    sent = bench.put(0, [frame[0], frame[1], frame[0], frame[1], frame[2], frame[3], frame[0]])[2]
    assert sent == [frame[0], frame[1], frame[0], frame[3], frame[3], frame[3]]
    assert bench.drops == {"queue_full": 1}


@pytest.mark.parametrize(("tos", "marked"), [(2, 3), (0, 0)])
def test_ordinary_datagrams_are_marked_and_dropped_by_their_own_place(tos: int, marked: int) -> None:
    packets = [bytes([i]) * 100 for i in range(29)] + [b"tail" * 5]
    frame = udp(MACS[2], MACS[0], WORKERS[0], endpoint(HOSTS[2], 9), packets, tos)
    bench = Bench(options={"p2": PortOptions(rate=8e6, depth=50 * 142, ecn=40 * 142)})
    # the first fits below the threshold, and passes as it is
    assert bench.put(0, [frame]) == [[], [], [frame]]
    # of the second, ten and a half places are left before the threshold and ten behind it
    out = [Parsed(one) for one in bench.put(0, [frame])[2]]
    assert [(one.tos, len(one.packets)) for one in out] == [(tos, 11), (marked, 9), (marked, 1)]
    # the last one is short enough for what is left
    assert [got for one in out for got in one.packets] == packets[:20] + packets[29:]
    assert [(one.to, one.hardware, one.port, one.aim) for one in out] == [(MACS[2], MACS[0], 5001, 9)] * 3
    assert bench.drops == {"queue_full": 9}
    counters = bench.switch.ports[2].counters()
    assert (counters["passed"], counters["marked"], counters["dropped"]) == (1 + 21, 10, 9)


def test_super_frames_count_their_length_on_the_wire() -> None:
    frame = udp(MACS[2], MACS[0], WORKERS[0], endpoint(HOSTS[2], 9), [b"x" * 100] * 30)
    bench = Bench(options={"p2": PortOptions(rate=8, depth=1 << 20)})
    bench.put(0, [frame])
    assert bench.switch.ports[2].counters()["peak_bytes"] == 30 * 142


def test_raw_frames_carry_packets_behind_an_ip_header() -> None:
    bench = Bench(raw=True)

    def raw(worker: int, body: bytes) -> bytes:
        return ethernet(OWN_MAC, MACS[worker], 0x0700, ipv4(HOSTS[worker], OWN, 1, body, ttl=9))

    assert bench.put(0, [raw(0, packet(s, 0, 1, ONES * 2)) for s in range(5)]) == [[], [], []]
    out = bench.put(1, [raw(1, packet(s, 1, 1, ONES * s)) for s in range(5)])
    for port in (0, 1):
        assert len(out[port]) == 5
        for slot, frame in enumerate(out[port]):
            assert frame[:HEADER_BYTES] == bytes(HEADER_BYTES)
            assert frame[10:24] == ethernet(MACS[port], OWN_MAC, 0x0700, b"")[HEADER_BYTES:]
            assert frame[24 + 12 : 44] == IPv4Address(OWN).packed + IPv4Address(HOSTS[port]).packed
            assert frame[44:] == packet(slot, 1, 1, ONES * (slot + 2))
    assert out[2] == []
    # without a program for them, they are frames like any other
    plain = Bench()
    frame = ethernet(MACS[2], MACS[0], 0x0700, ipv4(HOSTS[0], HOSTS[2], 1, b"anything"))
    assert plain.put(0, [frame]) == [[], [], [frame]]


def test_aged_slots_leave_from_the_switch_once_the_ps_is_found() -> None:
    bench = Bench(known=False, adder={"age": 1.0})
    bench.put(0, [from_worker(0, [packet(3, 0, 1, ONES)])])
    bench.switch.on_timer(1.0)
    asked = [one.take() for one in bench.devices.values()]
    assert bench.drops == {"no_route": 1}
    for frames in asked:
        assert [frame[HEADER_BYTES + 38 :] for frame in frames] == [IPv4Address(HOSTS[2]).packed]
    bench.put(2, [ethernet(OWN_MAC, MACS[2], 0x0806, arp(2, MACS[2], HOSTS[2], OWN))])
    bench.put(0, [from_worker(0, [packet(3, 0, 2, ONES)])], 2.0)
    bench.switch.on_timer(3.0)
    (one,) = map(Parsed, bench.devices["p2"].take())
    assert (one.address, one.port, one.target, one.aim) == (OWN, PORT, HOSTS[2], PORT)
    assert one.packets == [packet(3, 255, 2, ONES)]


def test_a_full_flow_table_is_begun_anew() -> None:
    bench = Bench(adder={"slots": 4})
    for first in range(0, parse.MOST_FLOWS + 128, 64):
        aims = [endpoint(f"10.1.{(first + i) >> 8}.{(first + i) & 255}", PORT) for i in range(64)]
        frames = [udp(MACS[2], MACS[0], WORKERS[0], aim, [packet(100, 0, 1, ONES)]) for aim in aims]
        out = [Parsed(frame) for frame in bench.put(0, frames)[2]]
        assert [endpoint(one.target, one.aim) for one in out] == aims
    assert bench.drops == {}


@pytest.mark.parametrize("buffer", [8 << 20, 1])
def test_what_the_kernel_does_not_take_waits_or_is_lost(buffer: int) -> None:
    bench = Bench()
    port = bench.switch.ports[2]
    port.outbox._buffer = buffer  # type: ignore[attr-defined]
    bench.devices["p2"].accepts = 0
    beyond = [packet(100 + i, 0, 1, ONES) for i in range(40)]
    other = ethernet(MACS[2], MACS[0], 0x88B5, b"other")
    bench.put(0, [from_worker(0, beyond, PS)])
    bench.put(0, [other] * 3)
    assert port.blocked
    port.resume()
    assert bench.devices["p2"].sent == []
    bench.devices["p2"].accepts = 1 << 30
    port.resume()
    first, *others = bench.devices["p2"].take()
    assert Parsed(first).packets == beyond
    assert others == ([other] * 3 if buffer > 1 else [])
    assert bench.drops == ({} if buffer > 1 else {"egress_full": 3})


def test_faults_at_a_port_are_drawn_for_every_fragment_and_repeat() -> None:
    def heard(seed: int) -> list[bytes]:
        faults = Faults(seed, drop=0.1, corrupt=0.1, reorder=0.2, duplicate=0.05, delay=0.001)
        clock = [0.0]
        bench = Bench(options={"p0": PortOptions(faults=faults)}, clock=lambda: clock[0])
        beyond = [packet(100 + i, 0, 1, ONES) for i in range(500)]
        got = bench.put(0, [from_worker(0, beyond[i : i + 50], PS) for i in range(0, 500, 50)])[2]
        while bench.switch.timer() < 0.01:
            clock[0] = max(bench.switch.timer(), clock[0])
            bench.switch.on_timer(clock[0])
            got += bench.devices["p2"].take()
        counters = bench.switch.ports[0].counters()
        packets = [one for frame in got for one in Parsed(frame).packets]
        assert len(packets) == 500 - counters["injected"] + counters["injected_duplicates"]
        assert bench.drops == {"injected": counters["injected"]}
        assert packets != sorted(packets)
        assert set(packets) <= set(beyond)
        return packets

    first = heard(1)
    assert 350 < len(first) < 480
    assert heard(1) == first != heard(2)


def test_ordinary_frames_meet_the_faults_too() -> None:
    bench = Bench(options={"p0": PortOptions(faults=Faults(1, drop=0.3))}, clock=lambda: 0.0)
    frames = [ethernet(MACS[1], MACS[0], 0x88B5, bytes([i])) for i in range(100)]
    sent = [frame for i in range(0, 100, 20) for frame in bench.put(0, frames[i : i + 20])[1]]
    assert 50 < len(sent) < 90
    assert sent == [frame for frame in frames if frame in sent]
    assert bench.drops == {"injected": 100 - len(sent)}


def test_programs_run_side_by_side_and_cannot_reach_each_others_slots() -> None:
    """Two by UDP port and one by raw frames, in one batch; the sources of one are strangers to the others."""
    adders = {
        "one": Adder(WORKERS, PS, name="one"),
        "two": Adder([WORKERS[1], WORKERS[0]], PS, name="two"),
        "raw": Adder([endpoint(HOSTS[0], 0), endpoint(HOSTS[1], 0)], name="raw"),
    }
    registrations = [
        Registration(
            name,
            adder,
            () if name == "raw" else (range(PORT + number, PORT + number + 1),),
            raw=name == "raw",
            uplinks=dict.fromkeys(adder.workers, 0),
            groups={GROUP: tuple(adder.workers)},
        )
        for number, (name, adder) in enumerate(adders.items())
    ]
    bench = Bench()
    bench.switch = FrameSwitch(Pipeline(registrations), bench.devices, bench.tables)
    ordinary = ethernet(MACS[2], MACS[0], 0x88B5, b"beside them")

    def frames(worker: int) -> list[bytes]:
        body = packet(5, worker, 1, ONES * (worker + 5))
        return [
            ethernet(OWN_MAC, MACS[worker], 0x0700, ipv4(HOSTS[worker], OWN, 1, body)),
            from_worker(
                worker,
                [packet(5, 1 - worker, 1, ONES), packet(6, 1 - worker, 1, ONES)],
                endpoint(OWN, PORT + 1),
            ),
            ordinary,
            from_worker(worker, [packet(5, worker, 1, ONES * 7)], endpoint(OWN, PORT)),
        ]

    assert bench.put(0, frames(0)) == [[], [], [ordinary]]
    out = bench.put(1, frames(1))
    for port in (0, 1):
        raw = [frame for frame in out[port] if frame[22:24] == b"\x07\x00"]
        assert [frame[44:] for frame in raw] == [packet(5, 1, 1, ONES * 11)]
        found = {
            one.port: one.packets for one in map(Parsed, (frame for frame in out[port] if frame not in raw))
        }
        assert found == {
            PORT: [packet(5, 1, 1, ONES * 14)],
            PORT + 1: [packet(5, 0, 1, ONES * 2), packet(6, 0, 1, ONES * 2)],
        }
    assert {name: int(adder.bitmap.sum()) for name, adder in adders.items()} == {"one": 3, "two": 6, "raw": 3}
    # the first program's worker at the second program's port, by the number it has at the first
    bench.put(0, [udp(OWN_MAC, MACS[0], WORKERS[0], endpoint(OWN, PORT + 1), [packet(9, 0, 1, ONES)])])
    assert adders["two"].bitmap[9] == 0
    assert bench.drops == {"foreign_host": 1}


def test_sums_of_every_job_of_a_program_come_from_the_switch() -> None:
    """Not from a worker of the job whose packets the switch has seen first, whose address means nothing to others."""
    jobs = {number: [endpoint(host, 5000 + number) for host in HOSTS[:2]] for number in (1, 2)}
    program = SwitchMLProgram(values=64, budget=100_000, age=5.0)
    for number, workers in jobs.items():
        program.add_job(Tenant(number, {one: 1 << i for i, one in enumerate(workers)}, number, slots=8))
    bench = Bench()
    registration = Registration(
        "switchml",
        program,
        (range(PORT, PORT + 1),),
        uplinks={one: 0 for workers in jobs.values() for one in workers},
        groups={number: tuple(workers) for number, workers in jobs.items()},
    )
    bench.switch = FrameSwitch(Pipeline([registration]), bench.devices, bench.tables)
    frames = {
        worker: [
            udp(
                OWN_MAC, MACS[worker], one[worker], SWITCH, [Contribution(job, 0, 0, 0, (job,) * 64).encode()]
            )
            for job, one in jobs.items()
        ]
        for worker in (0, 1)
    }
    assert bench.put(0, frames[0]) == [[], [], []]
    out = bench.put(1, frames[1])
    for port in (0, 1):
        found = {one.aim: (one.address, one.port, len(one.packets)) for one in map(Parsed, out[port])}
        assert found == {5001: (OWN, PORT, 1), 5002: (OWN, PORT, 1)}


def _honest(number: int) -> bytes:
    """Frames of all kinds, to be damaged."""
    worker = number % 2
    return (
        from_worker(worker, [packet(slot, worker, 1, ONES) for slot in range(4)]),
        from_worker(worker, [packet(100, worker, 1, ONES)], PS, tos=1),
        ethernet(MACS[2], MACS[worker], 0x0800, ipv4(HOSTS[worker], HOSTS[2], 6, b"z" * 40, 1)),
        ethernet(OWN_MAC, MACS[worker], 0x0800, ipv4(HOSTS[worker], HOSTS[2], 6, b"z" * 40)),
        ethernet(OWN_MAC, MACS[worker], 0x0800, ipv4(HOSTS[worker], OWN, 1, b"\x08" + bytes(20))),
        ethernet(BROADCAST, MACS[worker], 0x0806, arp(1, MACS[worker], HOSTS[worker], OWN)),
        ethernet(OWN_MAC, MACS[worker], 0x0700, ipv4(HOSTS[worker], OWN, 1, packet(3, worker, 1, ONES))),
    )[number % 7]


@settings(max_examples=100)
@given(st.data())
def test_whatever_arrives_nothing_breaks_and_no_frame_grows(data: st.DataObject) -> None:
    link = data.draw(st.sampled_from([14, 14, 0]))
    bench = Bench(
        link=link,
        raw=data.draw(st.booleans()),
        options={"p2": PortOptions(rate=8, depth=5000, ecn=100)},
    )
    frames = []
    for number in data.draw(st.lists(st.integers(0, 27), min_size=1, max_size=6)):
        frame = bytearray(_honest(number))
        if not link:
            del frame[HEADER_BYTES : HEADER_BYTES + 14]
        for at, value in data.draw(
            st.lists(st.tuples(st.integers(0, len(frame) - 1), st.integers(0, 255)), max_size=6)
        ):
            frame[at] = value
        # the kernel gives virtio-net and link headers in any case
        least = HEADER_BYTES + link
        frames.append(bytes(frame[: data.draw(st.sampled_from([len(frame), len(frame), least, least + 21]))]))
    sent = bench.put(data.draw(st.integers(0, 2)), frames)
    bench.switch.on_timer(1.0)
    largest = max(map(len, frames))
    assert all(len(frame) <= max(largest, HEADER_BYTES + 42) for out in sent for frame in out)
    stats = bench.switch.stats()
    stages = stats["stages"]
    assert stages["parse"] == len(frames)  # type: ignore[index]
