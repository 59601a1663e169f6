"""Probe of the kernel's own data path: whether ``ina-agg`` can aggregate by XDP here."""

from collections.abc import Iterator

from inanet.cli.findings import Finding

_FIXES = {
    "permission": "run ina-agg with CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and CAP_NET_RAW, as its unit file does",
    "no libbpf": "apt-get install libbpf1",
    "kernel": "use a newer kernel, or set xdp = 'off' in [node]",
    "no BTF": "use a distribution's kernel, or set xdp = 'off' in [node]",
}


def xdp() -> Iterator[Finding]:
    """Loads a program for a few slots, attaches it to nothing, and lets it go."""
    from inanet.xdp.attach import why_not

    reason = why_not()
    if reason is None:
        yield Finding("xdp", "OK", "ina-agg can aggregate in the kernel")
        return
    fix = next(
        (fix for start, fix in _FIXES.items() if reason.startswith(start)), "set xdp = 'off' in [node]"
    )
    yield Finding("xdp", "WARN", f"ina-agg aggregates in user space: {reason}", fix)
