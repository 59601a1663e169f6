"""Names of metrics, and what the shipped dashboard and alert rules ask for."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from inanet.cli.main import main
from inanet.service.metrics import FAMILIES, Durations, Sample, Scrape
from inanet.wire.drops import Drop

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = {f"{name}_total" if family.kind == "counter" else name for name, family in FAMILIES.items()}


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_what_is_asked_for_is_measured(file: str) -> None:
    text = (CONFIGS / file).read_text()
    asked = set(re.findall(r"\binanet_[a-z_]+", text))
    assert asked
    assert asked <= NAMES
    for reason in re.findall(r'reason=~\\?"([a-z_|]+)', text):
        assert set(reason.split("|")) <= {one.name.lower() for one in Drop}


def test_names_follow_the_conventions() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"inanet_[a-z_]+[a-z]", name)
        assert family.help.endswith(".")
        assert not name.endswith("_total"), "the client adds it"
        assert family.kind == "gauge" or "timestamp" not in name
    for unit in ("seconds", "bytes"):
        # base units, as the last word
        assert all(name.endswith(unit) for name in FAMILIES if f"_{unit}" in name)


def test_the_command_lists_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["metrics"]
    assert {one["name"] for one in listed} == NAMES
    assert main(["metrics"]) == 0
    assert "inanet_jobs" in capsys.readouterr().out
    for option, file in (("--alerts", "alerts.yml"), ("--dashboard", "grafana.json")):
        assert main(["metrics", option]) == 0
        assert capsys.readouterr().out == (CONFIGS / file).read_text()


def promtool(*arguments: str, **options: object) -> str:
    """What it finds wrong."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([program, "check", *arguments], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_takes_the_rules() -> None:
    assert promtool("rules", str(CONFIGS / "alerts.yml")) == ""


def test_promtool_takes_every_metric() -> None:
    duration = Durations()
    duration.add(0.2)
    scrape = Scrape()
    scrape.add(
        lambda: (
            Sample(name, duration if one.kind == "histogram" else 1, tuple("x" for _ in one.labels))
            for name, one in FAMILIES.items()
        )
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    assert promtool("metrics", input=generate_latest(registry).decode()) == ""
