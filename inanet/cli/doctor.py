"""``ina doctor``: what on this machine would be in the way, and the command that mends it."""

import json
from dataclasses import asdict

import click

from inanet.about import version
from inanet.cli import address_probes, coordinators, fabric_probes, host_probes, network_probes, xdp_probe
from inanet.cli.findings import Probe, examine
from inanet.service.exits import Exit

SCHEMA = 1
PROBES: tuple[Probe, ...] = (
    host_probes.kernel,
    host_probes.python,
    host_probes.packages,
    host_probes.capabilities,
    host_probes.processors,
    host_probes.memfd,
    host_probes.process_memory,
    host_probes.kernel_cache,
    network_probes.buffers,
    network_probes.segmentation,
    network_probes.multicast,
    network_probes.merging,
    network_probes.flooding,
    network_probes.mtu,
    network_probes.own_addresses,
    address_probes.chosen,
    xdp_probe.xdp,
    fabric_probes.clock,
    fabric_probes.fabric,
)
_COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command()
@click.option(
    "--config",
    type=click.Path(dir_okay=False, exists=True),
    metavar="FILE",
    help="A daemon's file of this machine, instead of those in /etc/inanet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(context: click.Context, config: str | None, as_json: bool) -> None:
    """Find out what on this machine would be in the way, and how to mend it.

    Every line is OK, WARN (works, but slowly or not everything) or FAIL (cannot work). Exit code 1 if
    anything is FAIL. Needs no privileges and changes nothing; its packets stay on 127.0.0.1, but for a question to the
    coordinator, if a file in /etc/inanet, or the one that is given, names one.
    """
    with coordinators.given(config):
        findings = list(examine(PROBES))
    ok = all(finding.status != "FAIL" for finding in findings)
    if as_json:
        report = {
            "schema": SCHEMA,
            "ok": ok,
            "version": version(),
            "findings": [asdict(item) for item in findings],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            status = click.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
            click.echo(f"{status}  {finding.name:{width}}  {finding.detail}")
            if finding.fix:
                click.echo(f"{'':{width + 6}}  fix: {finding.fix}")
    context.exit(Exit.OK if ok else Exit.FAILED)
