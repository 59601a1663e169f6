"""Probe of the kernel's own data path: whether ``ina-agg`` can aggregate, and ``ina-worker`` receive, by XDP here."""

from collections.abc import Iterator

from inanet.cli.findings import Finding

_FIXES = {
    "permission": "run ina-agg and ina-worker with CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and CAP_NET_RAW: see docs/xdp.md",
    "no libbpf": "apt-get install libbpf1",
    "kernel": "use a newer kernel, or set xdp = 'off' in [node]",
    "no BTF": "use a distribution's kernel, or set xdp = 'off' in [node]",
}


def xdp() -> Iterator[Finding]:
    """Loads both programs with a few slots, attaches them to nothing, and lets them go."""
    from inanet.xdp import attach

    for name, reason, can, instead in (
        ("xdp", attach.why_not(), "ina-agg can aggregate in the kernel", "ina-agg aggregates in user space"),
        (
            "xdp_worker",
            attach.why_not_workers(),
            "ina-worker can take results from the kernel without system calls",
            "ina-worker takes results from its socket",
        ),
    ):
        if reason is None:
            yield Finding(name, "OK", can)
            continue
        fix = next(
            (fix for start, fix in _FIXES.items() if reason.startswith(start)), "set xdp = 'off' in [node]"
        )
        yield Finding(name, "WARN", f"{instead}: {reason}", fix)
