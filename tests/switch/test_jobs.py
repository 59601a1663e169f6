"""Jobs that come to a switch and go: what they leave behind for others, and what is left of one that was refused."""

import errno
from contextlib import ExitStack

import pytest

from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import TensorJob, Terms
from inanet.proto.slots.systems import SYSTEMS
from inanet.switch.pipeline import Pipeline
from inanet.switch.programs import Job, admit, build, dismiss
from inanet.switch.udp import UdpSwitch
from inanet.wire.endpoint import endpoint

A, B, C, PS, OTHER = (endpoint(f"127.0.0.{index + 1}", 4000) for index in range(5))


def test_an_address_that_a_later_job_has_outlives_the_earlier_job() -> None:
    """A host's kernel may give a port out again before the switch has heard that its last job is over."""
    registration = build("atp", [Job(1, (A, B), PS)], memory=10_000, age=1.0)
    admit(registration, Job(2, (B, C), PS))
    dismiss(registration, 1)
    assert set(registration.uplinks) == {B, C, PS}
    dismiss(registration, 2)
    assert registration.uplinks == registration.groups == registration.users == {}


def test_a_ps_that_is_a_worker_of_another_job_stays() -> None:
    registration = build("atp", [Job(1, (A, B), PS), Job(2, (PS, C), OTHER)], memory=10_000, age=1.0)
    dismiss(registration, 1)
    assert set(registration.uplinks) == {PS, C, OTHER}


@pytest.mark.parametrize("system", ["switchml", "atp"])
def test_a_job_whose_ports_cannot_be_had_leaves_nothing_behind(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """Its slots and its number would have been gone for good, since nobody dismisses what was refused."""
    workers = (A, B, C)
    job = SYSTEMS[system].load_job()
    assert issubclass(job, TensorJob)
    plan = job.on(system, 7, workers, 0, Terms(results=0, ps=PS, exponents=0, window=8, slots=8, own=False))
    registration = build(system, [], memory=100_000, age=1.0, ports=(range(1),))
    switch = UdpSwitch(Pipeline([registration]))
    stack.callback(switch.close)
    free, beside, opened = registration.program.file.free, UdpDevice.beside, []

    def few(device: UdpDevice, peer: int, **options: int) -> UdpDevice:
        if len(opened) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.append(beside(device, peer, **options))
        return opened[-1]

    with monkeypatch.context() as context:
        context.setattr(UdpDevice, "beside", few)
        with pytest.raises(OSError, match="Too many open files"):
            switch.serve(system, plan, 0)
    assert registration.program.file.free == free
    assert [port.name for port in switch.ports] == [f"{system}/others"]
    assert [device.fileno() for device in opened] == [-1, -1]
    switch.serve(system, plan, 0)
    assert len(switch.ports) == len(workers) + (system == "atp") + 1
