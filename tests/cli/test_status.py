"""``ina status`` and ``ina top`` beside a coordinator in a thread, and what they make of two looks."""

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from inanet.aio.coordinator import Coordination
from inanet.aio.registration import Registration
from inanet.cli import figures
from inanet.cli.main import main
from inanet.cli.scraping import Pulse, Scraped, Value, pulse
from inanet.cli.status import lines, walk
from inanet.cli.top import Quit, View, picture
from inanet.config.daemons import load
from inanet.config.file import ConfigError
from inanet.coordinator.settings import Settings
from inanet.messages.registration import JobState, NodeState, Overview
from inanet.planning.topology import Topology
from inanet.service.metrics import Sample, Scrape
from inanet.service.resources import HostResources
from inanet.trust import authority
from inanet.trust.certificates import Keys
from tests.service.serving import serving

PATIENCE = 30.0
TOKEN = "a token of the fabric"


class Running:
    """A coordinator with one registered aggregator, in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.address = ""
        self._keys = Keys(str(directory / "ca.pem"), str(directory / "manager.pem"))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        topology = Topology(roots=("ps",), aggregators={"a0": "ps"}, workers={"w0": ("a0",)})
        settings = Settings(topology, TOKEN, heartbeat=0.05, expected=("a0", "ps"))
        coordination = Coordination(settings, None, keys=self._keys)
        await coordination.start("127.0.0.1:0")
        self.address = coordination.address
        registration = Registration(
            self.address, "manager", "aggregator", TOKEN, machine=HostResources("127.0.0.1"), keys=self._keys
        )
        seen = asyncio.create_task(coordination.changed())
        task = asyncio.create_task(registration.run())
        await seen
        self._ready.set()
        await self._over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await coordination.close("the test is over")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    authority.initialise(directory, 1)
    authority.issue(directory, "manager", roles=("aggregator",), coordinator=True, days=1)
    (directory / "token").write_text(f"{TOKEN}\n")
    return directory


@pytest.fixture(scope="module")
def running(keys: Path) -> Iterator[Running]:
    coordinator = Running(keys)
    yield coordinator
    coordinator.close()


def whom(running: Running, keys: Path) -> list[str]:
    files = {"--token-file": "token", "--ca-file": "ca.pem", "--key-file": "manager.pem"}
    options = [text for option, name in files.items() for text in (option, str(keys / name))]
    return ["--address", running.address, *options]


def test_status_as_json_and_as_text(running: Running, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *whom(running, keys), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["ok"], report["address"]) == (1, False, running.address)
    assert report["missing"] == ["a0", "ps"]
    (node,) = report["nodes"]
    assert (node["name"], node["role"], node["registered"], node["serves"]) == (
        "manager",
        "aggregator",
        True,
        False,
    )
    assert (report["jobs"], report["epoch"], report["in_network_share"]) == ([], 0, None)
    assert main(["status", *whom(running, keys)]) == 1
    text = capsys.readouterr().out
    assert "missing: a0, ps" in text
    assert "manager  aggregator" in text


def test_a_file_says_whom_to_ask(
    running: Running, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = f'token_file = "{keys}/token"\nca_file = "{keys}/ca.pem"\nkey_file = "{keys}/manager.pem"\n'
    for name, where in (("manager", "listen"), ("agg", "coordinator")):
        extra = "[fabric]\n" if name == "manager" else ""
        file = tmp_path / f"{name}.toml"
        file.write_text(f'[control]\n{where} = "{running.address}"\n{control}{extra}')
        assert main(["status", "--config", str(file), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["missing"] == ["a0", "ps"]


def test_in_a_shell_credentials_are_where_the_units_have_them_from(
    running: Running,
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    for place in ("inanet.config.daemons", "inanet.cli.coordinators"):
        monkeypatch.setattr(f"{place}.SYSTEM_DIRECTORY", tmp_path)
    for name, copy in (("token", "token"), ("ca.pem", "ca.pem"), ("manager.pem", "key.pem")):
        (tmp_path / copy).write_bytes((keys / name).read_bytes())
    control = "".join(
        f'{key} = "$CREDENTIALS_DIRECTORY/{file}"\n'
        for key, file in (("token_file", "token"), ("ca_file", "ca.pem"), ("key_file", "key.pem"))
    )
    file = tmp_path / "manager.toml"
    state = 'state_file = "${STATE_DIRECTORY}/epoch.json"'
    file.write_text(f'[node]\n{state}\n[control]\nlisten = "{running.address}"\n{control}[fabric]\n')
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == ["a0", "ps"]
    assert main(["check", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["config"]
    assert shown["node"]["state_file"] == "/var/lib/ina-manager/epoch.json"
    assert shown["control"]["key_file"] == f"{tmp_path}/key.pem"
    # the daemon itself has them from its unit, or not at all
    with pytest.raises(ConfigError, match="a variable in it is not set"):
        load(file)


def test_a_token_is_not_shown_to_a_network_by_mistake(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asking = [
        "status",
        "--address",
        "192.0.2.1:7400",
        "--token-file",
        str(keys / "token"),
        "--timeout",
        "0.1",
    ]
    assert main(asking) == 2
    assert "give --ca-file and --key-file, which 'ina keys' makes, or --insecure" in capsys.readouterr().err
    assert main(["status", "--address", "x:y", "--token-file", str(keys / "token")]) == 2
    assert "the port 'y' is not a number" in capsys.readouterr().err
    assert main(["status", "--address", "10.0.0.1"]) == 2
    assert "'10.0.0.1' has no port" in capsys.readouterr().err


def test_top_looks_as_often_as_it_is_told(
    running: Running, keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*whom(running, keys), "--interval", "0.2"]
    assert main(["top", *options, "--count", "2", "--json"]) == 0
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [look["schema"] for look in looks] == [1, 1]
    assert [node["name"] for node in looks[1]["nodes"]] == ["manager"]
    assert main(["top", *options, "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "missing: a0, ps" in shown
    assert "in the network" in shown
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", *options, "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("in the network") == 2
    assert shown.endswith("\n")
    assert shown.count(" aggregator ") == 2


def test_a_coordinator_whose_certificate_was_revoked_is_not_asked(
    running: Running, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "revoked.txt"
    options = [*whom(running, keys), "--revoked-file", str(listed), "--timeout", "0.3"]
    listed.write_text("AB somebody\n")
    assert main(["status", *options, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == ["a0", "ps"]
    listed.write_text((keys / "issued.txt").read_text())
    assert main(["status", *options]) == 1
    assert "the certificate of manager was revoked" in capsys.readouterr().err
    listed.write_text("no list\n")
    assert main(["status", *options]) == 2
    assert f"{listed}: line 1 is 'no list'" in capsys.readouterr().err
    assert main(["status", "--address", running.address, "--revoked-file", str(listed)]) == 2
    assert "--revoked-file is about certificates" in capsys.readouterr().err


def test_one_who_asks_a_tls_coordinator_in_plain_text_is_told_what_to_give(
    running: Running, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--token-file", str(keys / "token")]):
        assert main(["status", "--address", running.address, *options]) == 1
        assert (
            "it may want TLS: set control.ca_file and key_file, or give --ca-file and --key-file"
            in capsys.readouterr().err
        )


def test_nobody_answers(keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = ["--address", f"unix:{tmp_path}/gone", "--timeout", "0.2"]
    assert main(["status", *gone, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["ok"]) == (1, False)
    assert "no answer from the coordinator" in report["error"]
    assert "TLS" not in report["error"]
    assert main(["top", *gone]) == 1
    assert "no answer from the coordinator" in capsys.readouterr().err
    assert main(["status", "--address", "h:1", "--ca-file", str(keys / "ca.pem")]) == 2
    assert "belong together" in capsys.readouterr().err


def test_without_file_and_address_it_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inanet.cli.coordinators.SYSTEM_DIRECTORY", tmp_path)
    assert main(["status"]) == 2
    assert "--address HOST:PORT or --config FILE" in capsys.readouterr().err


def test_a_single_daemon_by_its_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    scrape = Scrape()
    scrape.add(lambda: [Sample("inanet_jobs", 3), Sample("inanet_packets_dropped", 2, ("short",))])
    with serving(scrape) as server:
        where = f"127.0.0.1:{server.port}"
        assert main(["status", "--metrics", where, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert main(["status", "--metrics", where]) == 0
        assert "inanet_packets_dropped_total  reason=short" in capsys.readouterr().out
        options = ["top", "--metrics", where, "--interval", "0.2", "--count"]
        assert main([*options, "2", "--json"]) == 0
        looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert main([*options, "1"]) == 0
        assert "sums/s" in capsys.readouterr().out
    assert {"name": "inanet_jobs", "labels": {}, "value": 3.0} in report["metrics"]
    assert [(look["jobs"], look["loss"], look["slots"]) for look in looks] == [
        (3, None, None),
        (3, 0.0, None),
    ]
    assert main(["status", "--metrics", where, "--timeout", "0.2"]) == 1
    assert "is metrics.listen set" in capsys.readouterr().err


def scraped(**values: float) -> Scraped:
    """A daemon's metrics; a label follows two underscores."""
    return Scraped(
        "url",
        tuple(
            Value(f"inanet_{name}", {"role": label, "reason": label} if label else {}, value)
            for key, value in values.items()
            for name, _, label in [key.partition("__")]
        ),
    )


def test_a_single_daemon_between_two_looks() -> None:
    before = scraped(
        gradient_bytes_total__sent=1000,
        gradient_bytes_total__received=0,
        contributions_total__network=10,
        packets_sent_total__fragment=100,
        packets_sent_total__all=150,
        retransmissions_total__requested=1,
        packets_dropped_total__short=2,
    )
    after = scraped(
        build_info__aggregator=1,
        jobs=2,
        gradient_bytes_total__sent=3000,
        gradient_bytes_total__received=500,
        contributions_total__network=30,
        packets_sent_total__fragment=200,
        packets_sent_total__all=900,
        retransmissions_total__requested=6,
        aggregator_slots__free=3,
        aggregator_slots__taken=1,
        packets_dropped_total__short=2,
        packets_dropped_total__foreign_job=4,
    )
    assert pulse(before, after, 2.0) == Pulse("aggregator", 2, 8000, 2000, 10, 0.05, 0.25, {"foreign_job": 4})
    # the first look, and one after a restart
    for earlier in (None, scraped(packets_sent_total__fragment=10**6)):
        found = pulse(earlier, after, 2.0)
        assert (found.loss, found.slots) == (None, 0.25)


def node(name: str, role: str, **counters: int) -> NodeState:
    return NodeState(name=name, role=role, registered=True, serves=role != "worker", counters=counters)  # type: ignore[arg-type]


def test_rates_losses_and_shares_are_those_since_the_look_before() -> None:
    before = Overview(
        epoch=1,
        nodes=(
            node("a0", "aggregator", rows_sent=100, retransmissions=10, slots_free=3, slots_total=4),
            node("ps", "ps", contributions_in=100),
            node("w0", "worker", leaf_contributions=200, rows_sent=9),
        ),
    )
    after = Overview(
        epoch=1,
        nodes=(
            node("a0", "aggregator", rows_sent=1100, retransmissions=30, slots_free=1, slots_total=4),
            node("ps", "ps", contributions_in=350),
            node("w0", "worker", leaf_contributions=1200, rows_sent=3),
        ),
    )
    a0, _, w0 = figures.rows(before, after, 2.0)
    assert a0.send_bps == 1000 * 8192 / 2
    assert (a0.loss, a0.slots) == (0.02, 0.75)
    assert w0.send_bps is None, "it was restarted in between"
    assert figures.share(before, after) == 0.75
    assert figures.share(None, after) == 1 - 350 / 1200
    assert figures.share(None, Overview(epoch=0)) is None
    # the PS reports a moment later than w0: over one look it was everything, over two it is what it is
    early = after.model_copy(update={"nodes": (*before.nodes[:2], after.nodes[2])})
    shares = figures.Shares()
    assert [shares.look(seen) for seen in (before, early, after)] == [0.5, 1.0, 0.75]
    assert [figures.rate(bps) for bps in (None, 7, 8200, 4.5e6, 9.99e9)] == [
        "-",
        "7 bit/s",
        "8 kbit/s",
        "4 Mbit/s",
        "9.99 Gbit/s",
    ]


def test_a_fabric_is_healthy_if_everybody_is_there_and_nobody_waits() -> None:
    job = JobState(
        name="train", state="running", ranks={"w0": (0,)}, world=1, roots=("ps",), trees=({"w0": "ps"},)
    )
    well = Overview(epoch=1, nodes=(node("ps", "ps"),), jobs=(job,))
    assert figures.healthy(well)
    late = node("a0", "aggregator").model_copy(update={"age": 20.0})
    unregistered = node("a0", "aggregator").model_copy(update={"registered": False})
    for update in (
        {"missing": ("a0",)},
        {"nodes": (late,)},
        {"nodes": (unregistered,)},
        {"jobs": (job.model_copy(update={"state": "forming"}),)},
    ):
        assert not figures.healthy(well.model_copy(update=update))
    text = "\n".join(lines(well))
    assert "job train: running, epoch 0, 1 of 1 ranks" in text
    assert text.endswith("  ps\n    w0")
    smaller = job.model_copy(update={"world": 4, "ranks": {"w0": (1, 2)}})
    assert figures.ranks(smaller) == "2 of 4 ranks, without ranks 0 and 3"
    assert figures.ranks(smaller.model_copy(update={"state": "forming"})) == "2 of 4 ranks"
    assert list(walk("r", {"a": "r", "b": "r", "c": "a"})) == [(0, "r"), (1, "a"), (2, "c"), (1, "b")]


def test_what_is_said_to_be_a_tree_and_is_none_is_shown_all_the_same() -> None:
    """A root with a parent, and nodes that only lead to each other: a coordinator of another version, or a broken one."""
    from rich.console import Console

    parents = {"r": "a", "a": "r", "b": "a", "x": "y", "y": "x", "z": "z"}
    # more of them than there are nodes would be a walk without an end
    assert list(islice(walk("r", parents), 9)) == [(0, "r"), (1, "a"), (2, "b")]
    job = JobState(name="train", state="running", ranks={}, roots=("r",), trees=(parents,))
    seen = Overview(epoch=1, jobs=(job,))
    assert list(lines(seen))[-4:] == ["  r", "    a", "      b", "  not under r: x, y, z"]
    console = Console(width=60)
    with console.capture() as shown:
        console.print(picture("here", seen, seen, 1.0, None))
    drawn = shown.get().splitlines()
    assert [line.strip() for line in drawn[-4:]] == [
        "├── r",
        "│   └── a",
        "│       └── b",
        "└── not under r: x, y, z",
    ]


def drawn(seen: Overview, width: int, view: View | None = None) -> list[str]:
    """A look in a terminal of so many columns."""
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as shown:
        console.print(picture("here", seen, seen, 1.0, None, view, width))
    return shown.get().splitlines()


@pytest.mark.parametrize(("width", "columns"), [(120, 9), (80, 9), (50, 5)])
def test_every_node_has_one_line_at_any_width(width: int, columns: int) -> None:
    one = node("aggregator-of-rack-17-in-the-basement", "aggregator")
    facts = {"cores": 128, "idle_cores": 99.5, "memory": 100, "memory_used": 55}
    nodes = [one.model_copy(update=facts), one]
    _, titles, *rows = drawn(Overview(epoch=0, nodes=tuple(nodes)), width)
    assert len(titles.split()) == columns
    assert len(rows) == len(nodes)
    assert all(len(line) <= width and line.startswith("aggregator-") for line in rows)
    assert all(word in titles for word in ("state", "sends", "receives", "loss"))
    assert ("aggregator " in rows[0].partition(" ")[2]) == (width == 120)


def test_keys_sort_help_and_quit() -> None:
    view = View()
    rows = [
        figures.Row("a", "worker", "idle", send_bps=1.0),
        figures.Row("b", "worker", "idle", send_bps=None),
    ]
    rows.append(figures.Row("c", "worker", "idle", send_bps=5.0))
    assert [row.name for row in view.order(rows[::-1])] == ["a", "b", "c"]
    assert view.press("s")
    assert [row.name for row in view.order(rows)] == ["c", "a", "b"]
    assert view.press("h")
    assert view.help
    assert not view.press("x")
    with pytest.raises(Quit):
        view.press("q")


def test_in_a_terminal_it_shows_its_keys_and_ends_with_q(running: Running, keys: Path) -> None:
    ours, theirs = pty.openpty()
    program = "import sys; from inanet.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "top", *whom(running, keys), "--interval", "30"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while b"q quit" not in shown:
                assert select.select([ours], [], [], PATIENCE)[0], shown
                shown += os.read(ours, 1 << 16)
            os.write(ours, b"hq")
            while True:
                try:
                    shown += os.read(ours, 1 << 16)
                except OSError:
                    # the terminal is gone with its last user
                    break
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            os.close(ours)
    assert b"sort nodes by loss" in shown


def test_metrics_for_people_have_units_and_leave_out_what_has_not_happened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = (
        Value("inanet_gradient_bytes_total", {"direction": "sent"}, 324713000.0),
        Value("inanet_packets_dropped_total", {"reason": "short"}, 0.0),
        Value("inanet_round_duration_seconds_sum", {}, 1.25),
        Value("inanet_jobs", {}, 12000.0),
    )
    monkeypatch.setattr("inanet.cli.status.scrape", lambda where, seconds: Scraped("url", values))
    assert main(["status", "--metrics", "x:1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "309.7 MiB  inanet_gradient_bytes_total        direction=sent",
        "  1.250 s  inanet_round_duration_seconds_sum",
        "   12,000  inanet_jobs",
    ]


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    seen = Overview(epoch=0, nodes=(node("aggregator-of-rack-17", "aggregator"), node("w", "worker")))
    title, first, second = list(lines(seen))[1:]
    assert title.index("role") == first.index("aggregator ") == second.index("worker")
