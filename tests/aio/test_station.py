"""What a daemon's data plane is opened with."""

import socket
import time
from pathlib import Path

import pytest
import structlog.testing

from inanet.aio.kernel_limits import KernelLimits
from inanet.aio.station import Station, open_device
from inanet.config.daemons import MODELS
from inanet.config.file import validate
from inanet.service.addresses import AddressError
from inanet.service.metrics import FAMILIES
from inanet.wire.endpoint import show

TOKEN = "a secret of the whole fabric, long enough"
WORKERS = [{"name": "w0", "parent": "x"}]


@pytest.mark.parametrize(
    ("role", "sections"),
    [
        ("agg", {"control": {"coordinator": "10.9.8.7:7400", "token": TOKEN, "insecure": True}}),
        (
            "ps",
            {
                "control": {"listen": "10.9.8.7:7400", "token": TOKEN, "insecure": True},
                "topology": {"workers": WORKERS},
            },
        ),
    ],
)
async def test_a_loopback_address_is_not_announced_to_other_machines(role, sections):
    config = validate(MODELS[role], {"node": {"name": "x"}, **sections}, Path("x.toml"))
    with pytest.raises(
        AddressError, match=r"x would advertise 127\.0\.0\.1 to the coordinator at 10\.9\.8\.7"
    ):
        await open_device(config, time.monotonic)


@pytest.mark.parametrize("coordinator", ["127.0.0.1:7400", "unix:/run/inanet/control.sock"])
async def test_a_loopback_address_is_right_for_a_fabric_on_one_machine(coordinator):
    config = validate(
        MODELS["agg"], {"node": {"name": "x"}, "control": {"coordinator": coordinator}}, Path("x.toml")
    )
    device = await open_device(config, time.monotonic)
    try:
        assert show(device.endpoint).startswith("127.0.0.1:")
    finally:
        device.close()


async def test_an_address_of_another_machine_is_refused_with_those_of_this_one():
    node = {"name": "x", "listen": "203.0.113.9"}
    config = validate(
        MODELS["agg"], {"node": node, "control": {"coordinator": "unix:/run/c"}}, Path("x.toml")
    )
    says = r"cannot bind UDP 203\.0\.113\.9:0: .*lo \(127\.0\.0\.1\).*: set node\.listen to one of them"
    with pytest.raises(AddressError, match=says):
        await open_device(config, time.monotonic)


async def test_a_name_to_listen_at_must_resolve_and_a_coordinators_may_later(monkeypatch):
    def unresolved(*asked: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    control = {"coordinator": "nohost.invalid:7400", "token": TOKEN, "insecure": True}
    config = validate(MODELS["agg"], {"node": {"name": "x"}, "control": control}, Path("x.toml"))
    (await open_device(config, time.monotonic)).close()
    sections = {"topology": {"workers": WORKERS}, "node": {"name": "x"}}
    control = {"listen": "nohost.invalid:7400", "token": TOKEN, "insecure": True}
    config = validate(MODELS["ps"], {**sections, "control": control}, Path("x.toml"))
    with pytest.raises(AddressError, match=r"^control\.listen: 'nohost\.invalid' is neither"):
        await open_device(config, time.monotonic)


async def test_metrics_tell_multicast_from_unicast():
    config = validate(
        MODELS["agg"], {"node": {"name": "x"}, "control": {"coordinator": "unix:/run/c"}}, Path("x.toml")
    )
    station = Station("aggregator", config, await open_device(config, time.monotonic), lambda: None)
    try:
        assert station.identity().groups
        state = station.node.state
        state.results_multicast, state.repairs_multicast, state.repairs_unicast = 70, 8, 9
        found = {(sample.name, *sample.labels): sample.value for sample in station.samples()}
    finally:
        station.close()
    assert found["inanet_packets_sent", "aggregator", "multicast_result"] == 70
    assert found["inanet_result_repairs", "multicast"] == 8
    assert found["inanet_result_repairs", "unicast"] == 9
    assert {name for name, *_ in found} <= set(FAMILIES)


def test_what_the_kernel_refuses_is_logged_once_and_counted():
    limits = KernelLimits()
    names = ("segmentation", "merging", "interface_merging", "receive_buffer")
    granted = {"gro": 1, **{f"{name}_refused": 0 for name in names}}
    with structlog.testing.capture_logs() as logs:
        assert not any(limits.look(granted).values())
        for _ in range(2):
            found = limits.look({**granted, "segmentation_refused": 1})
            assert found == {f"{name}_refused": int(name == "segmentation") for name in names}
    (line,) = logs
    assert "UDP_SEGMENT" in line["event"]
    assert "ethtool -K" in line["fix"]


async def test_worker_without_a_coordinator_has_a_device() -> None:
    config = validate(
        MODELS["worker"], {"node": {"name": "x"}, "local": {"socket": "/run/x"}}, Path("x.toml")
    )
    device = await open_device(config, time.monotonic)
    assert device.counters()["rx_packets"] == 0
    device.close()
