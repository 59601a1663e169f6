"""The switch's configuration: what the shipped file means, and what is refused in which words."""

import re
import tomllib
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from inanet.aio.switch import SwitchError, open_switch
from inanet.config.daemons import detect_role, load
from inanet.config.file import ConfigError, write_toml
from inanet.config.switch import Switch, SwitchConfig
from inanet.proto.slots.systems import SYSTEMS
from inanet.wire.switchml import SIZES

SHIPPED = Path(__file__).parents[2] / "configs" / "switch.toml"


def loaded(directory: Path, text: str) -> SwitchConfig:
    file = directory / "s.toml"
    file.write_text(text)
    config = load(file)
    assert isinstance(config, SwitchConfig)
    return config


def refused(directory: Path, text: str) -> list[str]:
    """The problems of a file, as they are shown."""
    with pytest.raises(ConfigError) as caught:
        loaded(directory, text)
    return [str(problem) for problem in caught.value.problems]


def test_the_shipped_file_has_every_key_and_its_defaults(tmp_path: Path) -> None:
    shipped = load(SHIPPED)
    assert isinstance(shipped, SwitchConfig)
    everything = re.sub(r"^# (\[|\w+ = )", r"\1", SHIPPED.read_text(), flags=re.MULTILINE)
    # an option of netreduce, shown where all are
    everything = re.sub(r"^rings = 1 .*\n", "", everything, flags=re.MULTILINE)
    written = tomllib.loads(everything)
    assert set(written) == set(SwitchConfig.model_fields)
    assert set(written["switch"]) == set(Switch.model_fields)
    assert set(written["switch"]["ports"][0]) >= {"name", "rate", "depth", "ecn", "drop", "behind"}
    # with interfaces for ports, the file with everything in it, but for secrets that are elsewhere, is one to begin with
    frames = (
        re.sub(r"^(behind|attracts|\w+_file) = .*\n", "", everything, flags=re.MULTILINE)
        .replace('transport = "udp"', 'transport = "packet"')
        .replace('address = "127.0.0.1"', 'address = "10.0.0.254"')
    )
    full = loaded(tmp_path, frames)
    assert full.impair.active
    examples = {"transport", "address", "hardware", "loopback"}
    examples |= {"ports", "hosts", "routes", "programs", "rings"}
    for key in Switch.model_fields.keys() - examples:
        assert getattr(full.switch, key) == getattr(shipped.switch, key), key
    for key in Switch.model_fields.keys() - {"programs"}:
        assert getattr(shipped.switch, key) == getattr(Switch(), key), key


def test_what_is_printed_reads_back_as_the_same(tmp_path: Path) -> None:
    config = load(SHIPPED)
    assert loaded(tmp_path, write_toml(config)) == config
    full = loaded(
        tmp_path,
        """
[switch]
transport = "packet"
address = "10.0.0.254"
ports = [{ name = "eth0", rate = "1 Gbit/s", ecn = "80 kB", drop = "1 %" }, { name = "eth1" }]
hosts = [{ address = "10.0.0.1", hardware = "02:00:00:00:00:0A", port = "eth0" }]
routes = [{ network = "10.1.0.0/16", port = "eth1", gateway = "10.0.0.1" }]
[[switch.programs]]
system = "a2tp"
jobs = [{ job = 3, workers = ["10.0.0.1", "10.0.0.2"], ps = "10.0.0.3", quota = 9 }]
""",
    )
    assert loaded(tmp_path, write_toml(full)) == full
    assert full.switch.hosts[0].hardware == "02:00:00:00:00:0a"
    assert detect_role({"switch": {}}) == "switch"
    assert full.switch.own_hardware("s0") == full.switch.own_hardware("s0") != full.switch.own_hardware("s1")


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    text = """
[switch]
transport = "packet"
address = "10.0.0"
hardware = "01:00:00:00:00:00"
registers = "1 MB"
recirculations = 300
ports = [{ name = "eth0", rate = "0 bit/s" }]
[[switch.programs]]
system = "swtchml"
[[switch.programs]]
system = "atp"
udp_ports = "9-7"
jobs = [
    { job = 256, workers = ["10.0.0.1:1", "10.0.0.1:1"], ps = "host:1" },
    { job = 1, workers = [], slots = 0 },
]
"""
    assert refused(tmp_path, text) == [
        "switch.address: '10.0.0' is not an IPv4 address; allowed: e.g. '10.0.0.1'",
        "switch.hardware: '01:00:00:00:00:00' is not a host's hardware address; allowed: e.g. '02:00:00:00:00:01'",
        "switch.recirculations: 300 is not allowed; allowed: less than or equal to 254",
        "switch.ports[0].rate: '0 bit/s' lets nothing pass; allowed: any higher rate, or leave it out for no limit",
        f"switch.programs[0].system: 'swtchml' is no program; allowed: {', '.join(SYSTEMS)}",
        "switch.programs[1].udp_ports: '9-7' is not a range of UDP ports; allowed: e.g. '48864-48879' or '7410'",
        "switch.programs[1].jobs[0].job: 256 is not allowed; allowed: less than or equal to 255",
        "switch.programs[1].jobs[0].workers: 2 workers, 1 of them different; allowed: 1 to 32, each once",
        "switch.programs[1].jobs[0].ps: 'host:1' is not an endpoint; allowed: 'address:port', e.g. '10.0.0.1:4000', "
        "or the address alone for raw frames",
        "switch.programs[1].jobs[1].workers: 0 workers, 0 of them different; allowed: 1 to 32, each once",
        "switch.programs[1].jobs[1].slots: 0 is not allowed; allowed: greater than or equal to 1",
    ]


#: the beginning of a ring of one host, at the switch 10.0.0.9
RACKED = (
    'transport = "packet"\naddress = "10.0.0.9"\nports = [{ name = "e" }]\nrings = [{ ring = 1, '
    'connections = [{ source = "10.0.0.1", destination = "10.0.0.2", queue_pair = 1 }], '
)
OTHER = '{ source = "10.0.0.1", destination = "10.0.0.2", queue_pair = 7 }'
TWICE = 'queue_pair = 1 }, { source = "10.0.0.1", destination = "10.0.0.2", queue_pair = 1 }'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'registers = "6 MB"\nprograms = [{ system = "atp" }, { system = "a2tp" }]',
            "switch.programs: the programs take 8000000 B of registers (atp 4000000 B, a2tp 4000000 B) and the switch has "
            "6000000 B; allowed: less memory for them, or more registers",
        ),
        (
            'programs = [{ system = "atp" }, { system = "atp" }]',
            "switch.programs: two programs are called atp; allowed: a name for each",
        ),
        (
            'programs = [{ system = "atp", jobs = [{ job = 1, workers = ["10.0.0.1:1"] }, { job = 1, workers = ["10.0.0.2:1"] }] }]',
            "switch.programs: program atp has job 1 twice; allowed: each number once",
        ),
        (
            'programs = [{ system = "atp", jobs = [{ job = 1, workers = ["10.0.0.1:1"], ps = "10.0.0.2" }] }]',
            "switch.programs: program atp, job 1: 10.0.0.2 has no port; allowed: address:port over UDP",
        ),
        ('ports = [{ name = "eth0" }]', "switch.ports: 'eth0' is not an endpoint; allowed: 'address:port'"),
        (
            'transport = "packet"\naddress = "10.0.0.9"\nports = []\n',
            "switch.ports: transport 'packet' has no ports of its own; allowed: one { name } per interface",
        ),
        (
            'transport = "packet"\nports = [{ name = "eth0" }]',
            "switch: address is 127.0.0.1, which no host can send frames to; allowed: an address of the hosts' network",
        ),
        (
            'transport = "packet"\naddress = "10.0.0.9"\nports = [{ name = "e" }, { name = "e" }]',
            "switch.ports: 'e' stands there twice",
        ),
        (
            'transport = "packet"\naddress = "10.0.0.9"\nports = [{ name = "e", attracts = ["10.0.0.1"] }]',
            "switch.ports: e: behind and attracts are for transport 'tun'; allowed: hosts and routes",
        ),
        (
            'rings = [{ ring = 1, connections = [{ source = "10.0.0.1", destination = "10.0.0.2", queue_pair = 1 }] }]',
            "switch.rings: rings are connections between other hosts; allowed: with transport packet or tun",
        ),
        (
            RACKED + 'racks = [{ switch = "10.0.0.9", hosts = ["10.0.0.1"] }] }]',
            "switch.rings[0].racks: spine and racks belong together; allowed: both, or neither",
        ),
        (
            RACKED + 'spine = "10.0.0.8", racks = [{ switch = "10.0.0.9", hosts = ["10.0.0.3"] }] }]',
            "switch.rings[0].racks: 10.0.0.1 is on no rack; allowed: one",
        ),
        (
            RACKED + 'spine = "10.0.0.9", racks = [{ switch = "10.0.0.9", hosts = ["10.0.0.1"] }] }]',
            "switch.rings[0].racks: 10.0.0.9 is there as a switch twice; allowed: each once",
        ),
        (
            RACKED + 'spine = "10.0.0.8", racks = [{ switch = "10.0.0.7", hosts = ["10.0.0.1"] }] }]',
            "switch.rings: ring 1 is on several racks, and none of its switches has this one's address 10.0.0.9; "
            "allowed: 10.0.0.8, 10.0.0.7",
        ),
        (
            RACKED + "window = 3 }]",
            "switch.rings[0].window: 3 messages in flight; allowed: a power of two, because MsgIDs wrap",
        ),
        (
            RACKED + "packet = 100 }]",
            "switch.rings[0].packet: 100 bytes; allowed: the path MTU of RoCE connections, 256, 512, 1024, 2048 or 4096, or a "
            "multiple of 8",
        ),
        (
            RACKED + "length = 65536 }]",
            "switch.rings[0].length: 65536 is not allowed; allowed: less than or equal to 65535",
        ),
        (
            RACKED + "length = 65535, window = 64 }]",
            "switch.rings[0].window: 64 messages of 65535 packets in flight; allowed: so few that sequence numbers of 24 bits",
        ),
        (
            RACKED.replace("queue_pair = 1 }", TWICE) + "epoch = 0 }]",
            "switch.rings[0].connections: 10.0.0.1 to 10.0.0.2, queue pair 1, stands there twice; allowed: once",
        ),
        (
            RACKED + "epoch = 0 }, { ring = 1, connections = [" + OTHER + "] }]",
            "switch.rings: ring 1 stands there twice; allowed: each number once",
        ),
        (
            RACKED
            + "epoch = 0 }, { ring = 2, connections = ["
            + OTHER.replace("pair = 7", "pair = 1")
            + "] }]",
            "switch.rings: rings 1 and 2 have the same connection, 10.0.0.1 to 10.0.0.2, queue pair 1; allowed: one of them",
        ),
        (
            'transport = "tun"\naddress = "10.0.0.9"\nports = [{ name = "e" }]\nroutes = [{ network = "0.0.0.0/0", port = "f" }]',
            "switch.routes: there is no port 'f'; allowed: e",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (problem,) = refused(tmp_path, f"[switch]\n{text}\n")
    assert problem.startswith(says)


def test_sections_of_other_daemons_are_named(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, "[switch]\n[topology]\n")
    assert problem.startswith("topology: unknown section (only ina-ps and ina-manager have it)")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            'system = "zebra", jobs = [{ job = 1, workers = ["127.0.0.1:9"] }]',
            "switch s: job 1 of program zebra: jobs that push and pull keys come from a coordinator",
        ),
        (
            'system = "switchml", jobs = [{ job = 1, workers = ["127.0.0.1:9"] }]',
            "switch s: job 1: this switch shares no slots; the job needs a share of its own",
        ),
        (
            'system = "switchml", memory = "1 MB", jobs = [{ job = 1, workers = ["127.0.0.1:9"], slots = 999 }]',
            "switch s: program switchml: job 1 asks for 999 slots",
        ),
        (
            'system = "atp", jobs = [{ job = 1, workers = ["127.0.0.1:9"] }]',
            "switch s: job 1: atp needs the address of a PS",
        ),
    ],
)
def test_programs_that_cannot_be_built_say_why(tmp_path: Path, program: str, says: str) -> None:
    config = loaded(tmp_path, f'[node]\nname = "s"\n[switch]\nprograms = [{{ {program} }}]\n')
    with pytest.raises(SwitchError) as caught:
        open_switch(config)
    assert str(caught.value).startswith(says)


def test_over_udp_all_programs_run_together(tmp_path: Path) -> None:
    job = '{ job = 1, workers = ["127.0.0.1:9"], ps = "127.0.0.1:8", slots = 64 }'
    shared = {"switchml": "", "netreduce": ""}
    entries = ", ".join(
        f'{{ system = "{one}", memory = "1 MB", udp_ports = "0", {shared.get(one, "shared = 99,")} jobs = [{job}] }}'
        for one in SYSTEMS
        if one not in ("goat", "goat-async", "zebra")
    )
    # their jobs come from a coordinator
    for one in ("goat", "goat-async", "zebra"):
        entries += f', {{ system = "{one}", memory = "1 MB", udp_ports = "0" }}'
    switch = open_switch(loaded(tmp_path, f"[switch]\nprograms = [{entries}]\n"))
    try:
        assert switch.endpoints().keys() == SYSTEMS.keys()
        assert len(set(switch.endpoints().values())) == len(SYSTEMS)
    finally:
        switch.close()


def test_a_switch_over_udp_is_built_from_its_file(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """
[node]
name = "s"
[impair]
drop = 0.1
[switch]
recirculations = 3
loopback = "1 Gbit/s"
ports = [{ name = "127.0.0.1:4001", rate = "1 Mbit/s", depth = "10 kB", ecn = "5 kB", drop = 0.0 }]
[[switch.programs]]
system = "switchml"
udp_ports = "0"
values = 256
values_per_pass = 64
jobs = [{ job = 1, workers = ["127.0.0.1:4000", "127.0.0.1:4001"], slots = 16 }]
""",
    )
    switch = open_switch(config)
    try:
        (one,) = switch.pipeline.registrations  # type: ignore[attr-defined]
        assert (one.passes, dict(one.groups)) == (4, {1: tuple(one.uplinks)})
        first, second, _ = switch.ports
        assert first.queue.rate is None  # type: ignore[attr-defined]
        assert (second.queue.rate, second.queue.depth, second.queue.ecn) == (10**6, 10_000, 5_000)  # type: ignore[attr-defined]
        assert "injected" in first.counters()
        assert "injected" not in second.counters()
        assert switch.endpoints()["switchml"] >> 16 == int(IPv4Address("127.0.0.1"))
    finally:
        switch.close()
    tight = config.model_copy(update={"switch": config.switch.model_copy(update={"recirculations": 2})})
    with pytest.raises(SwitchError, match="need 4 passes through the pipeline"):
        open_switch(tight)


def test_options_of_programs_are_those_of_their_systems(tmp_path: Path) -> None:
    text = '[switch]\n[[switch.programs]]\nsystem = "{}"\n{}\n'
    assert refused(tmp_path, text.format("switchml", "values = 8")) == [
        "switch.programs[0].values: 8 is none that switchml has; allowed: 64 or 256"
    ]
    assert refused(tmp_path, text.format("atp", "values = 64")) == [
        "switch.programs[0].values: atp has no such option; allowed: shared"
    ]
    assert refused(tmp_path, text.format("goat", "rings = 2")) == [
        "switch.programs[0].rings: goat has no such option; allowed: none of its own"
    ]
    assert set(SYSTEMS["switchml"].formats) == set(SIZES)
