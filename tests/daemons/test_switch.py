"""``ina-switch`` as a process: SwitchML packets in, sums out, figures at the end."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inanet.phy.udp import UdpDevice
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint, show
from inanet.wire.switchml import Packet, decode, frame_bytes
from tests.daemons.processes import PATIENCE, ROOT, Daemon

pytestmark = pytest.mark.processes
VALUES = 64


def contribution(worker: int, slot: int) -> tuple[int, ...]:
    return tuple(range(1000 * worker + slot, 1000 * worker + slot + VALUES))


def receive(device: UdpDevice, count: int) -> list[Packet]:
    """The next packets, decoded."""
    got: list[Packet] = []
    poll = select.poll()
    poll.register(device.fileno(), select.POLLIN)
    while len(got) < count:
        assert poll.poll(PATIENCE * 1000), f"{len(got)} of {count} packets"
        batch = device.receive()
        if batch is not None:
            got += [decode(batch.packet(i)) for i in range(len(batch))]
    return got


def test_sums_come_back_and_figures_are_written(tmp_path: Path) -> None:
    workers = [UdpDevice(), UdpDevice()]
    names = [show(worker.endpoint) for worker in workers]
    file = tmp_path / "s.toml"
    file.write_text(
        f"""
[node]
name = "s0"
[switch]
[[switch.programs]]
system = "switchml"
values = {VALUES}
udp_ports = "0"
jobs = [{{ job = 5, workers = {json.dumps(names)}, slots = 32 }}]
[[switch.programs]]
system = "atp"
udp_ports = "0"
jobs = [{{ job = 5, workers = {json.dumps(names)}, ps = "127.0.0.1:1" }}]
"""
    )
    notify, stats = str(tmp_path / "notify"), tmp_path / "stats.json"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(notify)
        process = subprocess.Popen(
            [sys.executable, "-m", "daemons.switch", "--config", str(file)],
            cwd=ROOT,
            env={**os.environ, "NOTIFY_SOCKET": notify, "INA_STATS_FILE": str(stats)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        daemon = Daemon(process, channel)
        try:
            address, _, port = daemon.notified("READY")["X_INANET_SWITCHML"].partition(":")
            length = frame_bytes(VALUES)
            for number, worker in enumerate(workers):
                packets = [
                    Packet(5, slot, slot, 0, contribution(number, slot), (number, 1)).encode()
                    for slot in range(32)
                ]
                arena = np.frombuffer(b"".join(packets), np.uint8).copy()
                offsets = np.arange(32, dtype=np.int64) * length
                worker.send(Transmission(endpoint(address, int(port)), arena, offsets, length))
            for worker in workers:
                assert sorted(receive(worker, 32), key=lambda one: one.slot) == [
                    Packet(
                        5,
                        slot,
                        slot,
                        0,
                        tuple(map(sum, zip(contribution(0, slot), contribution(1, slot), strict=True))),
                        (1, 1),
                    )
                    for slot in range(32)
                ]
            daemon.signal(signal.SIGTERM)
            status, errors = daemon.end()
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
            for worker in workers:
                worker.close()
    assert status == 0, errors
    figures = json.loads(stats.read_text())
    assert figures["drops"] == {}
    assert figures["stages"]["slot"] == 64
    assert figures["programs"]["switchml"]["completed"] == 32
    assert figures["registers"]["held"].keys() == {"switchml", "atp"}
    assert figures["ports"][f"switchml/{names[0]}"]["tx_packets"] == 32


def test_a_budget_that_is_too_small_is_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[switch]\nregisters = "1 MB"\nprograms = [{ system = "switchml" }]\n')
    command = [sys.executable, "-m", "daemons.switch", "--config", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "the programs take 4000000 B of registers" in done.stderr
    assert done.stderr.count("\n") == 1
