import dataclasses
import io
import json

import pytest
from click.testing import CliRunner

from inanet.demo import cli, report
from inanet.demo.audit import Verdict
from inanet.demo.run import Options, Outcome, judge
from inanet.launch.counters import Counters, Traffic, traffic
from inanet.launch.interrupts import Interrupted
from inanet.launch.reports import DemoError
from inanet.service.exits import Exit

VERDICT = Verdict(
    weights="ab" * 32,
    steps_within_bound=True,
    worst_step=17,
    worst_element=1234,
    gradient_error=1.1e-10,
    gradient_bound=1.2e-10,
    weights_within_bound=True,
    max_weight_difference=1.8e-7,
    bound=2.6e-5,
    accuracy=0.9555,
    baseline_accuracy=0.9583,
    loss=0.1304101,
    baseline_loss=0.1304102,
)
TRAFFIC = Traffic(23_400_000, 46_800_000, 0.5, 12, {"injected": 40})


def outcome(problems=(), drops=None):
    return Outcome(
        options=Options(),
        verdict=VERDICT,
        traffic=dataclasses.replace(TRAFFIC, drops=drops or {}),
        identical_weights=not problems,
        steps_per_second=123.4,
        seconds=12.3,
        problems=tuple(problems),
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_json_object_has_the_promised_keys():
    answer = report.to_dict(outcome())
    assert list(answer)[: len(report.KEYS)] == list(report.KEYS)
    assert answer == json.loads(json.dumps(answer))
    assert (answer["schema"], answer["ok"]) == (1, True)
    assert answer["bytes_into_ps"] == 23_400_000
    assert answer["bytes_without_ina"] == 46_800_000
    assert report.to_dict(outcome(["no"]))["ok"] is False


def test_a_failure_has_the_same_keys():
    answer = report.failure("agg0 ended unasked")
    assert set(answer) == {*report.KEYS, "error"}
    assert answer["ok"] is False
    assert answer["seconds"] is None


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_table_says_everything(stream):
    sink = stream()
    report.print_table(outcome(drops={"bad_checksum": 3, "injected": 40}), sink)
    for text in (
        "95.55%",
        "95.83% in a single process",
        "bit-identical",
        "123",
        "23.4 MB",
        "46.8 MB without",
    ):
        assert text in sink.getvalue()
    for text in (
        "50.0%",
        "dropped, bad_checksum",
        "dropped, injected",
        "1.8e-07",
        "2.6e-05 allowed",
        "12.3",
        "OK: ",
    ):
        assert text in sink.getvalue()


def test_the_table_of_a_failed_run_ends_with_the_reasons():
    sink = io.StringIO()
    report.print_table(outcome(["the workers' weights differ"]), sink)
    assert sink.getvalue().endswith("FAILED: the workers' weights differ\n")
    assert "DIFFERENT" in sink.getvalue()
    assert "dropped" not in sink.getvalue()


def test_plain_progress_is_a_line_a_second(monkeypatch):
    now = iter([10.0, 10.5, 10.9, 11.1])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    sink = io.StringIO()
    with report.progress(sink) as show:
        show.stage("training")
        for step in range(1, 5):
            show.step(step, 300, 2.0 / step)
    assert sink.getvalue().splitlines() == [
        "# training",
        "# step     1 of 300, loss 2.0000",
        "# step     4 of 300, loss 0.5000",
    ]


def test_progress_on_a_terminal_moves():
    sink = Terminal()
    with report.progress(sink) as show:
        show.stage("training 300 steps")
        show.step(300, 300, 0.25)
    assert "training 300 steps" in sink.getvalue()
    assert "300/300" in sink.getvalue()
    assert "loss 0.2500" in sink.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (23_400_000, "23.4 MB"), (5e12, "5000.0 GB")],
)
def test_sizes_for_people(count, text):
    assert report.size(count) == text


def test_traffic_from_counters():
    """Four workers of 10 fragments each under two aggregators: the PS sees every fragment twice."""
    stats = {
        f"worker{k}": Counters(leaf_contributions=10, leaf_bytes=10_520, retransmissions=1) for k in range(4)
    }
    stats |= {f"agg{k}": Counters(contributions_in=20, drops={"injected": k}) for k in range(2)}
    stats["ps"] = Counters(rx_bytes=22_000, contributions_in=20, drops={"injected": 5, "duplicate": 1})
    found = traffic(stats)
    assert found.bytes_into_ps == 22_000
    assert found.bytes_without_ina == 40 * 1052
    assert found.in_network_share == 0.5
    assert found.retransmissions == 4
    assert found.slot_collisions is None
    assert found.drops == {"duplicate": 1, "injected": 6}


def test_traffic_of_a_fabric_with_a_switch():
    """Four workers of 10 fragments each; the switch hands every sum on, and one contribution that found no slot."""
    stats = {f"worker{k}": Counters(leaf_contributions=10, leaf_bytes=2750) for k in range(4)}
    stats["ps"] = Counters(contributions_in=11)
    stats["switch0"] = Counters.from_json(
        '{"programs": {"atp": {"collisions": 1}}, "drops": {"injected": 2}, "rx_packets": 1}'
    )
    found = traffic(stats)
    assert found.bytes_without_ina == 11_000
    assert found.in_network_share == 1 - 11 / 40
    assert found.slot_collisions == 1
    assert found.drops == {"injected": 2}


def test_traffic_of_a_fabric_that_carried_nothing():
    assert traffic({"ps": Counters()}).in_network_share == 0


def test_counters_of_a_newer_daemon_are_read():
    text = json.dumps({"rx_bytes": 5, "invented_later": 1, "drops": {"short": 2, "oversized": 0}})
    assert Counters.from_json(text) == Counters(rx_bytes=5, drops={"short": 2})


def test_a_good_run_has_no_problems():
    assert judge(VERDICT, [VERDICT.weights] * 4) == []


@pytest.mark.parametrize(
    ("change", "digests", "complaint"),
    [
        (
            {},
            [VERDICT.weights, "cd" * 32],
            "the workers' weights differ: rank 0 abababababab, rank 1 cdcdcdcdcdcd",
        ),
        ({}, ["cd" * 32] * 2, "rank 0 has weights cdcdcdcdcdcd, its averaged gradients lead to abababababab"),
        (
            {"steps_within_bound": False, "gradient_error": 0.1},
            [VERDICT.weights],
            "step 17, element 1234: the averaged gradient is off by 0.1, the number format allows 1.2e-10",
        ),
        (
            {"weights_within_bound": False, "max_weight_difference": 0.5},
            [VERDICT.weights],
            "the weights differ from the single-process run by up to 0.5, beyond the bound (at most 2.6e-05)",
        ),
    ],
)
def test_every_kind_of_wrong_run_is_a_problem(change, digests, complaint):
    assert judge(dataclasses.replace(VERDICT, **change), digests) == [complaint]


@pytest.fixture
def command(monkeypatch):
    """Run the command with ``run`` replaced by a function of the options, the progress and the check."""

    def invoke(replacement, *arguments):
        monkeypatch.setattr(cli, "run", replacement)
        return CliRunner().invoke(cli.demo, list(arguments))

    return invoke


def test_only_the_object_goes_to_standard_output(command):
    def run(options, show, check):
        assert options == Options(workers=3, steps=7, seed=5, impair=0.05)
        show.stage("working")
        show.step(1, 7, 1.0)
        check()
        return outcome()

    result = command(run, "--workers", "3", "--steps", "7", "--seed", "5", "--impair", "0.05", "--json")
    assert result.exit_code == Exit.OK
    assert json.loads(result.stdout)["ok"] is True
    assert "# working" in result.stderr


def test_a_run_beyond_its_bound_exits_with_1(command):
    result = command(lambda *_: outcome(["beyond the bound"]))
    assert result.exit_code == Exit.FAILED
    assert "FAILED: beyond the bound" in result.stdout


def test_a_run_that_breaks_off_exits_with_1_and_says_why(command):
    def run(*_):
        raise DemoError("rank2 failed with status 1; its log ends with:\nno route")

    result = command(run, "--json")
    assert result.exit_code == Exit.FAILED
    assert "no route" in json.loads(result.stdout)["error"]
    assert "ina demo: rank2 failed" in result.stderr


def test_an_interrupted_run_exits_with_130(command):
    def run(*_):
        raise Interrupted("SIGTERM")

    result = command(run)
    assert result.exit_code == 130
    assert result.stderr.startswith("SIGTERM: ")
    assert result.stdout == ""


def test_without_scikit_learn_the_extra_is_named(command, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    result = command(lambda *_: pytest.fail("started anyway"))
    assert result.exit_code == Exit.MISSING
    assert "pip install 'inanet[demo]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--system", "dsync"], "'dsync' is not in this version; it has: xagg, switchml, atp, esa, a2tp"),
        (["--workers", "17"], "17 is not in the range 1<=x<=16"),
        (["--workers", "0"], "0 is not in the range"),
        (["--impair", "0.9"], "0.9 is not in the range"),
        (["--steps", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_allowed(command, arguments, complaint):
    result = command(lambda *_: pytest.fail("started anyway"), *arguments)
    assert result.exit_code == Exit.USAGE
    assert complaint in result.stderr
