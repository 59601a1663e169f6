"""Packets that hosts of a lab lose: XDP programs on their interfaces, for Linux without netem.

>>> with Lab("star4") as lab, Loss(lab, 0.01) as loss:
...     ...
...     print(loss.packets)
"""

import os
import socket
import struct
from types import TracebackType
from typing import Self

from inanet.lab import namespaces
from inanet.lab.layout import HOST_INTERFACE
from inanet.lab.session import Lab
from inanet.phy.interface import Feature, set_feature
from inanet.xdp.build import LOSS_OBJECT
from inanet.xdp.libbpf import Object
from inanet.xdp.memory import processors

#: XDP_FLAGS_DRV_MODE
_NATIVE = 1 << 2


class Loss:
    """Every host of a lab loses a ``share`` of the UDP and TCP packets that arrive, while the block lasts.

    A share of 0 is the same path without loss: packets come one by one and are merged after the program has seen them.
    """

    def __init__(self, lab: Lab, share: float) -> None:
        self._lab = lab
        self._share = share
        self._object: Object | None = None
        self._links: list[int] = []

    def __enter__(self) -> Self:
        """Raises :class:`~inanet.xdp.libbpf.BpfError` and :class:`~inanet.xdp.libbpf.NoLibrary`."""
        self._object = Object(LOSS_OBJECT.read_bytes())
        try:
            self._object.map(".rodata").initial()[:4] = struct.pack("=I", round(self._share * 1e6))
            self._object.load()
            for host in self._lab.hosts:
                self._links.append(namespaces.inside(self._lab.namespace(host), self._attach))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def packets(self) -> int:
        """Packets lost so far, by all hosts together."""
        assert self._object is not None
        value = self._object.map("lost").get(bytes(4), 8 * processors())
        return sum(struct.unpack(f"={processors()}Q", value)) if value is not None else 0

    def _attach(self) -> int:
        assert self._object is not None
        link = self._object.program("lose").attach(socket.if_nametoindex(HOST_INTERFACE), _NATIVE)
        try:
            # as a network card's driver does, behind the program
            set_feature(HOST_INTERFACE, Feature.RECEIVE_MERGING, True)
        except OSError:
            os.close(link)
            raise
        return link

    def _close(self) -> None:
        for link in self._links:
            os.close(link)
        self._links.clear()
        if self._object is not None:
            self._object.close()
            self._object = None
