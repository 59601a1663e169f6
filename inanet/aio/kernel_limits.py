"""What the kernel refuses a device: each is logged once with its fix, and shown as a counter and a metric.

A device goes on without, at several times the processor time or with smaller windows.
"""

from collections.abc import Mapping
from typing import Any

import structlog

_log: Any = structlog.get_logger("inanet.device")

#: by counter of a device: what was refused, and what to do
REFUSALS: Mapping[str, tuple[str, str]] = {
    "segmentation_refused": (
        "segmentation offload (UDP_SEGMENT): every packet costs a system call, several times the processor time",
        "turn it on (ethtool -K DEVICE tx-udp-segmentation on tx-checksum-ip-generic on)",
    ),
    "merging_refused": (
        "merging on receive (UDP_GRO): every packet is delivered alone, several times the processor time",
        "use Linux 5.0 or later, outside sandboxes that have their own network stack",
    ),
    "interface_merging_refused": (
        "merging by the network interface (GRO is off): every packet goes through the stack alone, several times the processor time",
        "turn it on (ethtool -K DEVICE gro on)",
    ),
    "receive_buffer_refused": (
        "the receive buffer that was asked for: smaller windows, lower throughput",
        "raise net.core.rmem_max (sysctl) to [node] receive_buffer, or run with CAP_NET_ADMIN",
    ),
}


class KernelLimits:
    """Looks at the counters of a device for what was refused."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def look(self, counters: Mapping[str, int]) -> dict[str, int]:
        """1 for each refusal, else 0; the first time it is logged."""
        found = {name: int(counters.get(name, 0) > 0) for name in REFUSALS}
        for name, (what, fix) in REFUSALS.items():
            if found[name] and name not in self._said:
                self._said.add(name)
                _log.warning(f"the kernel refuses {what}", fix=fix)
        return found
