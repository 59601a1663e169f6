"""Probes of what this machine shares with others: its clock, and the fabric that its configuration names."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

from inanet.cli import certificate_probe, coordinators, figures, peer_probes
from inanet.cli.findings import Finding
from inanet.messages.registration import Overview
from inanet.service.exits import Failure

CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
#: Sources whose reading is no system call.
FAST_SOURCES = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"})
#: adjtimex(2) returns it while nobody keeps the clock in step with others.
_TIME_ERROR = 5
#: More than sizeof(struct timex) on any machine; all zero, it only asks.
_TIMEX_BYTES = 512
SECONDS = 2.0


def _clock_state() -> int:
    return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))


def clock() -> Iterator[Finding]:
    """How dear it is to read the time, and whether it is that of the other machines (traces, certificates)."""
    source = CLOCK_SOURCE.read_text().strip() if CLOCK_SOURCE.exists() else "unknown"
    synchronised = _clock_state() != _TIME_ERROR
    detail = f"source {source}, {'kept in step' if synchronised else 'not kept in step with other machines'}"
    if source not in FAST_SOURCES:
        fix = "boot with clocksource=tsc, if the kernel's log does not call the TSC unstable"
        yield Finding("clock", "WARN", f"{detail}; reading it is a system call", fix)
    elif not synchronised:
        yield Finding("clock", "WARN", detail, "sudo timedatectl set-ntp true, or run chrony on the host")
    else:
        yield Finding("clock", "OK", detail)


def fabric() -> Iterator[Finding]:
    """Whether this node's certificate is good, the coordinator that a file of this machine names answers and misses nobody,
    names and ranks are used once, and multicast gets here from it; nothing without a file.
    """
    try:
        asked = coordinators.target()
    except coordinators.NoCoordinator:
        return
    except Failure as error:
        yield Finding(
            "fabric", "FAIL", str(error).replace("\n", "; "), "correct the file; 'ina check' reads it"
        )
        return
    yield from certificate_probe.certificate(asked)
    try:
        seen = asked.ask(SECONDS)
    except Failure as error:
        fix = "start ina-manager, or the ina-ps that coordinates; see its log with journalctl"
        if "TLS" in str(error) or "certificate" in str(error):
            fix = "give both ends certificates of one authority: 'ina keys show' says whose a file is; see the coordinator's log"
        yield Finding("fabric", "WARN", str(error), fix)
        return
    what = f"{asked.address} knows {len(seen.nodes)} nodes and {len(seen.jobs)} jobs"
    if figures.healthy(seen):
        yield Finding("fabric", "OK", what)
    else:
        yield _unwell(what, seen)
    yield from peer_probes.names(seen, asked.name, asked.listen)
    yield from peer_probes.path(asked)


def _unwell(what: str, seen: Overview) -> Finding:
    late = [node.name for node in seen.nodes if figures.state(node) in ("late", "unregistered")]
    waiting = [f"job {job.name} waits for {', '.join(job.missing)}" for job in seen.jobs if job.missing]
    parts = [f"missing: {', '.join(seen.missing)}"] if seen.missing else []
    parts += [f"silent: {', '.join(late)}"] if late else []
    return Finding(
        "fabric", "WARN", "; ".join([what, *parts, *waiting]), "start what is missing; 'ina status' has all"
    )
