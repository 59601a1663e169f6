"""``ina metrics``: what daemons measure, and what Prometheus and Grafana make of it."""

import json
from pathlib import Path

import click

from inanet.cli import figures
from inanet.service.exits import Failure, pip_install
from inanet.service.metrics import FAMILIES

#: In a wheel they lie beside this file, in a source tree among the other configuration files.
_PLACES = (Path(__file__).with_name("host") / "configs", Path(__file__).resolve().parents[2] / "configs")
FILES = {"alerts": "alerts.yml", "dashboard": "grafana.json"}


@click.command()
@click.option("--alerts", "wanted", flag_value="alerts", help="Print alert rules for Prometheus instead.")
@click.option("--dashboard", "wanted", flag_value="dashboard", help="Print a dashboard for Grafana instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def metrics(wanted: str | None, as_json: bool) -> None:
    """List the metrics that daemons serve at /metrics, if [metrics] listen is set: name, kind, labels and meaning."""
    if wanted is not None:
        click.echo(packaged(FILES[wanted]), nl=False)
        return
    rows = [
        (f"{name}_total" if family.kind == "counter" else name, family.kind, family.labels, family.help)
        for name, family in FAMILIES.items()
    ]
    if as_json:
        listed = [dict(zip(("name", "kind", "labels", "help"), row, strict=True)) for row in rows]
        click.echo(json.dumps({"schema": 1, "ok": True, "metrics": listed}))
        return
    cells = [(name, kind, ", ".join(labels), meaning) for name, kind, labels, meaning in rows]
    for line in figures.table(("metric", "kind", "labels", "meaning"), cells, left=4):
        click.echo(line)


def packaged(name: str) -> str:
    """A file that comes with the program."""
    for place in _PLACES:
        if (place / name).exists():
            return (place / name).read_text()
    raise Failure(f"{name} is missing in this installation: {pip_install('--force-reinstall inanet')}")
