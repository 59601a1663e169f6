"""What a daemon's data plane is opened with."""

import time
from pathlib import Path

import pytest

from inanet.aio.station import open_device
from inanet.control.addresses import AddressError
from inanet.control.config import MODELS
from inanet.control.config_file import validate

TOKEN = "a secret of the whole fabric, long enough"
WORKERS = [{"name": "w0", "parent": "x"}]


@pytest.mark.parametrize(
    ("role", "sections"),
    [
        ("agg", {"control": {"coordinator": "10.9.8.7:7400", "token": TOKEN}}),
        ("ps", {"control": {"listen": "10.9.8.7:7400", "token": TOKEN}, "topology": {"workers": WORKERS}}),
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
    device.close()
