"""A switch of frames with ports in memory: two workers, a PS, the adder between them."""

import struct
from ipaddress import IPv4Address, IPv4Network

import numpy as np

from inanet.switch.framed import FrameSwitch
from inanet.switch.pipeline import Pipeline
from inanet.switch.programs import Registration
from inanet.switch.tables import Tables
from inanet.wire.endpoint import endpoint
from tests.switch.adder import GROUP, Adder
from tests.switch.memory import MemoryPort, udp

HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
MACS = [0x02_00_00_00_00_01, 0x02_00_00_00_00_02, 0x02_00_00_00_00_03]
OWN, OWN_MAC, PORT = "10.0.0.254", 0x02_00_00_00_00_FE, 48_000
BROADCAST = (1 << 48) - 1
ONES = np.ones(16, np.int32)
WORKERS = [endpoint(HOSTS[0], 5001), endpoint(HOSTS[1], 5002)]
PS = endpoint(HOSTS[2], PORT)
SWITCH = endpoint(OWN, PORT)


class Bench:
    """Two workers, a PS, a port each; :meth:`put` says what they send."""

    def __init__(self, link: int = 14, known: bool = True, raw: bool = False, **options: object) -> None:
        self.devices = {f"p{i}": MemoryPort() for i in range(3)}
        members, ps = WORKERS, PS
        if raw:
            members, ps = [endpoint(host, 0) for host in HOSTS[:2]], endpoint(HOSTS[2], 0)
        adder_options = options.pop("adder", {})
        self.adder = Adder(members, ps, **adder_options)  # type: ignore[arg-type]
        self.registration = Registration(
            "adder",
            self.adder,
            () if raw else (range(PORT, PORT + 16),),
            raw=raw,
            uplinks={**dict.fromkeys(members, ps), ps: 0},
            groups={GROUP: tuple(members)},
        )
        self.tables = Tables(OWN_MAC if link else 0, int(IPv4Address(OWN)))
        if known:
            for i in range(3):
                self.tables.give_host(int(IPv4Address(HOSTS[i])), MACS[i], i)
        if not link:
            self.tables.set_routes([(IPv4Network(f"{host}/32"), i, 0) for i, host in enumerate(HOSTS)])
        self.switch = FrameSwitch(
            Pipeline([self.registration]),
            self.devices,
            self.tables,
            link=link,
            **options,  # type: ignore[arg-type]
        )

    def put(self, port: int, frames: list[bytes], now: float = 0.0) -> list[list[bytes]]:
        """What leaves at each port for frames that come in at one."""
        device = self.devices[f"p{port}"]
        device.arriving.append(frames)
        while self.switch.ports[port].read(now):
            pass
        return [one.take() for one in self.devices.values()]

    @property
    def drops(self) -> dict[str, int]:
        return self.switch.stats()["drops"]  # type: ignore[return-value]


def from_worker(worker: int, packets: list[bytes], to: int = SWITCH, tos: int = 0) -> bytes:
    """A super-frame of a worker to the switch, or to the PS."""
    hardware = OWN_MAC if to >> 16 == SWITCH >> 16 else MACS[2]
    return udp(hardware, MACS[worker], WORKERS[worker], to, packets, tos)


def arp(operation: int, hardware: int, address: str, target: str) -> bytes:
    return (
        struct.pack(">HHBBH", 1, 0x0800, 6, 4, operation)
        + hardware.to_bytes(6, "big")
        + IPv4Address(address).packed
        + bytes(6)
        + IPv4Address(target).packed
    )
