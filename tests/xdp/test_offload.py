"""Whether an aggregator uses the kernel: its configuration, what stands against it, and which mode it finds."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inanet.aio import attachment
from inanet.aio.attachment import ModeChoice, ModeUnavailable
from inanet.aio.inbox import open_receiving
from inanet.aio.offload import Offload, open_offload
from inanet.config.daemons import AggConfig, WorkerConfig
from inanet.config.file import validate
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.reliability import Link
from inanet.wire.endpoint import endpoint
from inanet.xdp.attach import Unavailable
from inanet.xdp.memory import COUNTS, KernelCount, Mode
from inanet.xdp.slots import PROBATION, SAMPLE, Road
from tests.xdp.conftest import lacking


def config(**node: object) -> AggConfig:
    """An aggregator's."""
    impair = node.pop("impair", {})
    sections = {"node": {"name": "a", **node}, "impair": impair, "control": {"coordinator": "127.0.0.1:1"}}
    return validate(AggConfig, sections, Path("a.toml"))  # type: ignore[return-value]


def device(address: str = "10.9.0.1") -> Any:
    """As far as the choice looks at it."""
    return SimpleNamespace(endpoint=endpoint(address, 7000))


def test_off_unless_asked_for() -> None:
    assert config().node.xdp == "off"
    assert open_offload(config(), device(), Timing()) is None


@pytest.mark.parametrize(
    ("node", "address", "reason"),
    [
        ({}, "127.0.0.1", "loopback"),
        ({}, "203.0.113.9", "203.0.113.9 is an address of no interface"),
        ({"transport": "packet"}, "10.9.0.1", "transport packet"),
        ({"rate": "1 Gbit/s"}, "10.9.0.1", "rate paces"),
        ({"impair": {"drop": "5 %"}}, "10.9.0.1", "impair"),
    ],
)
def test_reasons(node: dict[str, Any], address: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(attachment._log, "warning", lambda event, reason: said.append(reason), raising=False)
    assert open_offload(config(xdp="auto", **node), device(address), Timing()) is None
    (line,) = said
    assert line.startswith("driver: ")
    assert reason in line
    assert "\n" not in line
    with pytest.raises(ModeUnavailable, match=r"\[node\] xdp = 'native': driver: "):
        open_offload(config(xdp="native", **node), device(address), Timing())


def worker(**node: object) -> WorkerConfig:
    """A worker's."""
    sections = {
        "node": {"name": "w", **node},
        "impair": {"drop": "5 %"},
        "control": {"coordinator": "127.0.0.1:1"},
        "local": {"socket": "/run/w.sock"},
    }
    return validate(WorkerConfig, sections, Path("w.toml"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("node", "address", "reason"),
    [
        ({}, "127.0.0.1", "loopback"),
        ({}, "203.0.113.9", "203.0.113.9 is an address of no interface"),
        ({"transport": "tun"}, "10.9.0.1", "transport tun"),
    ],
)
def test_reasons_of_a_worker(
    node: dict[str, Any], address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        attachment._log, "warning", lambda event, reason: said.append((event, reason)), raising=False
    )
    assert worker().node.xdp == "off"
    assert open_receiving(worker(), device()) is None
    assert open_receiving(worker(xdp="auto", **node), device(address)) is None
    ((event, line),) = said
    assert event == "results through the socket"
    assert line.startswith("driver: ")
    assert reason in line
    assert "\n" not in line
    with pytest.raises(ModeUnavailable, match=r"\[node\] xdp = 'generic': driver: "):
        open_receiving(worker(xdp="generic", **node), device(address))


class Place:
    """Of a program, on no interface."""

    def __init__(self, interface: str, mode: Mode) -> None:
        self.interface, self.mode, self.attached = interface, mode, True

    def close(self) -> None:
        """Off."""
        self.attached = False


def without_a_kernel(monkeypatch: pytest.MonkeyPatch, refuses: tuple[Mode, ...] = ()) -> None:
    """Programs are attached to nothing, in any mode but those that are refused."""

    def attach(_: Any, interface: str, mode: Mode) -> Place:
        if mode in refuses:
            raise Unavailable(f"driver: that of {interface} has no {mode} XDP")
        return Place(interface, mode)

    monkeypatch.setattr(attachment, "Attachment", attach)


@pytest.mark.parametrize(
    ("merged", "packets", "frames", "mode"),
    [
        ("generic", 10_000, 200, "generic"),
        ("generic", 10_000, 10_000, "native"),
        ("off", 10_000, 10_000, "native"),
        # what the socket gets merged costs it less than the program's copy
        ("off", 10_000, 4_000, "off"),
        ("off", 8_000, 100, "generic"),
    ],
)
def test_what_is_better_depends_on_the_program_and_on_what_comes(
    monkeypatch: pytest.MonkeyPatch, merged: Any, packets: int, frames: int, mode: str
) -> None:
    without_a_kernel(monkeypatch)
    choice = ModeChoice(cast(Any, None), "eth0", "auto", merged)
    assert choice.choose(packets, frames) == (mode != "generic")
    assert choice.mode == mode
    # once is enough
    assert not choice.choose(20_000, 20_000) or mode == "generic"
    named = ModeChoice(cast(Any, None), "eth0", "generic", merged)
    assert not named.choose(packets, frames)
    assert named.mode == "generic"


class Standin(Offload):
    """The choice of a mode without a kernel."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, auto: bool, refuses: tuple[Mode, ...] = ()
    ) -> None:
        self.counts = [0] * COUNTS
        without_a_kernel(monkeypatch, refuses)
        self._shared = SimpleNamespace(kernel_counts=lambda: self.counts)  # type: ignore[assignment]
        self.slots = SimpleNamespace(unheard=False, try_again=self._again)  # type: ignore[assignment]
        self._warned = False
        self._choice = ModeChoice(cast(Any, None), "eth0", "auto" if auto else "native")

    def _again(self) -> None:
        self.slots.unheard = False  # type: ignore[misc]

    def came(self, packets: int, frames: int) -> None:
        """So much in all."""
        self.counts[KernelCount.BYTES], self.counts[KernelCount.FRAMES] = packets * 1052, frames
        self.review()


def test_merged_frames_keep_generic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Standin(monkeypatch, auto=True)
    choice.came(10_000, 200)
    assert choice.mode == "generic"


def test_lone_frames_make_the_driver_the_better_place(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Standin(monkeypatch, auto=True)
    choice.came(100, 100)
    assert choice.mode == "generic"
    choice.came(10_000, 10_000)
    assert choice.mode == "native"


def test_a_driver_that_has_no_native_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Standin(monkeypatch, auto=True, refuses=("native",))
    choice.came(10_000, 10_000)
    assert choice.mode == "generic"


def test_somebody_else_may_take_the_place_between_two_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Standin(monkeypatch, auto=True)
    without_a_kernel(monkeypatch, refuses=("native", "generic"))
    choice.came(10_000, 10_000)
    assert choice.mode == "off"


def test_frames_that_vanish_bring_generic_mode_back(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Standin(monkeypatch, auto=True)
    choice.came(10_000, 10_000)
    choice.slots.unheard = True  # type: ignore[misc]
    choice.review()
    assert choice.mode == "generic"
    choice.came(20_000, 20_000)
    assert choice.mode == "generic"
    named = Standin(monkeypatch, auto=False)
    named.slots.unheard = True  # type: ignore[misc]
    named.review()
    assert named.mode == "native"


def test_a_road_is_tried_before_it_is_trusted() -> None:
    # how much a link takes is its own matter
    link = cast(Link, SimpleNamespace(room=4000, taken=0, in_flight=0, packets=0))
    road = Road(link, 50)
    assert road.limit(50) == 50 + PROBATION
    # a shard that the program has sent nothing of says nothing, nor does what another lacks
    road.judge(1, 0)
    assert road.arrives is None
    for _ in range(200):
        road.lacked(2)
    for _ in range(100):
        road.lacked(1)
    road.judge(1, PROBATION)
    assert road.arrives is True
    assert road.limit(500) == 4500
    lost = Road(link, 0)
    for _ in range(PROBATION):
        lost.lacked(3)
    lost.judge(3, PROBATION)
    assert lost.arrives is False
    assert lost.limit(300) == 300


def test_a_parent_that_takes_more_than_user_space_has_sent_proves_the_road() -> None:
    link = Link("ps", 1, 1, window=4000)
    link.taken = 7
    road = Road(link, 0)
    link.packets += 100
    for taken, proven in ((107, None), (107 + 64, None), (107 + 65, True)):
        link.taken = taken
        road.look(PROBATION)
        assert road.arrives is proven
    asked = Road(link, 0)
    asked.heard((0, 1, 0), 100, 50)
    asked.heard((0, 1, 1), SAMPLE - 1, 0)
    # what had vanished was repeated by user space since
    asked.heard((0, 1, 0), 100, 5)
    assert asked.arrives is None
    # packets that were stuck come after all
    link.taken += 500
    asked.look(PROBATION)
    assert asked.arrives is None
    asked.heard((0, 1, 2), 100, 49)
    assert asked.arrives is True


def test_what_was_on_its_way_before_proves_no_road() -> None:
    link = Link("ps", 1, 1, window=200)
    link.in_flight = 150
    road = Road(link, 1000)
    link.taken += 150
    road.look(1000 + PROBATION)
    assert road.arrives is None
    assert road.limit(1000, half=True) == 1025
    road.release()
    assert link.in_flight == 150


def test_user_space_and_the_program_share_a_link_that_both_need() -> None:
    link = Link("ps", 1, 1, window=100)
    road = Road(link, 0, arrives=True)
    assert road.limit(0, half=True) == 50
    assert link.room == 50
    link.sent(50, 1.0)
    assert link.room == 0
    # of its half it has used 20
    road.settle(20, 2.0)
    assert link.room == 30
    assert road.limit(20) == 50


def test_the_drop_in_of_the_documentation(tmp_path: Path) -> None:
    """systemd takes it, and the exposure stays low."""
    program, tool = shutil.which("true"), shutil.which("systemd-analyze")
    if program is None or tool is None:
        lacking("systemd-analyze is not installed")
    root = Path(__file__).parents[2]
    text = (root / "docs" / "xdp.md").read_text().partition("```ini\n")[2].partition("```")[0]
    unit = (
        (root / "systemd" / "ina-agg.service").read_text().replace("/usr/local/bin/ina-agg ", f"{program} ")
    )
    merged = tmp_path / "ina-agg.service"
    merged.write_text(unit.replace("\n[Install]", text.partition("[Service]")[2] + "\n[Install]"))
    for arguments in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=40"]):
        done = subprocess.run([tool, *arguments, str(merged)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
