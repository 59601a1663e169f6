"""What hosts of a lab lose is lost, counted, and no more than that."""

import socket

import pytest

from inanet.lab import namespaces
from inanet.lab.loss import Loss
from inanet.lab.session import Lab

pytestmark = [
    pytest.mark.processes,
    pytest.mark.privileged("root, for a lab of network namespaces and XDP programs"),
    pytest.mark.usefixtures("root"),
]

SENT = 4000


def _received(lab: Lab) -> int:
    """How many of SENT packets from one host reach another."""

    def open_socket(host: str) -> socket.socket:
        made = namespaces.inside(
            lab.namespace(host), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        )
        made.settimeout(10)
        return made

    with open_socket("w0") as sender, open_socket("w1") as receiver:
        receiver.bind((lab.address("w1"), 0))
        count = 0
        for _ in range(SENT // 100):
            for _ in range(100):
                sender.sendto(b"x" * 100, receiver.getsockname())
            # on the same wire and before what follows: all others have come or are lost
            while True:
                sender.sendto(b"end", receiver.getsockname())
                receiver.settimeout(0.2)
                try:
                    while receiver.recv(200) != b"end":
                        count += 1
                except TimeoutError:
                    continue
                break
        return count


def test_a_share_of_packets_is_lost_and_counted() -> None:
    with Lab("star2") as lab, Loss(lab, 0.2) as loss:
        before = loss.packets
        received = _received(lab)
        lost = loss.packets - before
    # six standard deviations
    assert abs(SENT - received - 0.2 * SENT) < 6 * (SENT * 0.2 * 0.8) ** 0.5
    assert SENT - received <= lost <= SENT - received + SENT // 100


def test_a_path_without_loss_loses_nothing() -> None:
    with Lab("star2") as lab:
        with Loss(lab, 0.0) as loss:
            assert _received(lab) == SENT
            assert loss.packets == 0
        # and without the program
        assert _received(lab) == SENT
