"""Configuration files: what they mean, and everything that is wrong with them in one go."""

import re
from pathlib import Path
from typing import Any

import pytest

from inanet.config import file as config_file
from inanet.config.daemons import MODELS, AggConfig, PsConfig, Role, WorkerConfig, detect_role, load
from inanet.config.file import ConfigError, find_file, write_toml
from inanet.config.manager import ManagerConfig
from inanet.service.addresses import HostPort
from inanet.trust import authority

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED: list[Role] = ["worker", "agg", "ps", "manager"]
TOKEN = "0123456789abcdef0123456789abcdef"


def written(directory: Path, text: str) -> Path:
    """A file with this text."""
    file = directory / "node.toml"
    file.write_text(text)
    return file


def problems(directory: Path, text: str, role: Role | None = None) -> list[str]:
    """The lines of the error that loading this text gives, without the file's name."""
    file = written(directory, text)
    with pytest.raises(ConfigError) as caught:
        load(file, role)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    assert [f"{file}: {problem}" for problem in caught.value.problems] == lines
    return [line.removeprefix(f"{file}: ") for line in lines]


def test_a_worker_of_one_host_needs_no_coordinator(tmp_path: Path) -> None:
    config = load(written(tmp_path, '[local]\nsocket = "/run/x"\n'))
    assert isinstance(config, WorkerConfig)
    assert config.control.coordinator is None


def test_defaults_are_for_one_machine(tmp_path: Path) -> None:
    config = load(written(tmp_path, '[control]\ncoordinator = "localhost"\n'))
    assert isinstance(config, AggConfig)
    assert config.node.listen == HostPort("127.0.0.1", 0)
    assert config.control.coordinator == HostPort("localhost", 7400)
    node, timing = config.node, config.timing
    assert (node.receive_buffer, node.send_buffer, node.memory) == (4 << 20, 512 << 10, 1 << 30)
    assert (timing.reorder_window, timing.retransmit, timing.retransmit_max) == (0.002, 0.02, 0.5)
    assert config.metrics.listen is None
    assert not config.impair.active
    assert config.control.secret() == ""


def test_all_errors_at_once_each_with_what_is_allowed(tmp_path: Path) -> None:
    text = """
lgo = 1
[node]
name = "w 0"
lisen = "x"
listen = "0.0.0.0"
transport = "upd"
receive_buffer = "4 mib"
send_buffer = "1 KiB"
rate = "0 Gbit/s"
burst = "1 MB/s"
mode = "0600"
[log]
level = "inof"
[metrics]
listen = "127.0.0.1"
[control]
coordinator = "10.0.0.1"
heartbeat = 5
[local]
mode = 660
allow_users = "alice"
cpus = [0, "1", -1]
[timing]
reorder_window = "0 s"
retransmit = "1 s"
[impair]
drop = 1.5
seed = true
delay = "1"
[topology]
"""
    assert problems(tmp_path, text, "worker") == [
        "node.name: 'w 0' is not a name; allowed: 1 to 128 letters, digits and ._:@+-, a letter or digit "
        "first",
        "node.listen: 0.0.0.0 is no address to be known by; allowed: the address or interface that the other "
        "nodes reach",
        "node.transport: 'upd' is unknown (did you mean 'udp'?); allowed: 'udp', 'rawip', 'packet' or 'tun'",
        "node.receive_buffer: '4 mib' has the unknown unit 'mib' (did you mean 'MiB'?); allowed: a number "
        "and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, e.g. '64 MiB'",
        "node.send_buffer: 1 KiB is out of range; allowed: 64 KiB to 1 GiB",
        "node.rate: '0 Gbit/s' lets nothing pass; allowed: any higher rate, or leave it out for no limit",
        "node.burst: '1 MB/s' has the unknown unit 'MB/s'; allowed: a number and one of B, KiB, MiB, GiB, TiB, "
        "kB, MB, GB, TB, e.g. '64 MiB'",
        "node.lisen: unknown key (did you mean 'listen'?); allowed: name, listen, transport, receive_buffer, "
        "send_buffer, rate, burst, rate_negotiation, memory, xdp",
        "node.mode: unknown key (it belongs in [local]); allowed: name, listen, transport, receive_buffer, "
        "send_buffer, rate, burst, rate_negotiation, memory, xdp",
        "log.level: 'inof' is unknown (did you mean 'info'?); allowed: 'debug', 'info', 'warning' or 'error'",
        "metrics.listen: '127.0.0.1' has no port; allowed: an IPv4 address, host name or interface with "
        ":port",
        "timing.reorder_window: '0 s' is too short; allowed: any longer duration",
        "timing.retransmit_max: 500 ms is shorter than retransmit; allowed: 1 s or more",
        "impair.seed: True is not allowed; allowed: a whole number",
        "impair.drop: 1.5 is not a probability; allowed: 0 up to but not including 1, or e.g. '5 %'",
        "impair.delay: '1' has no unit; allowed: a number and one of ns, us, ms, s, min, h, e.g. '200 ms'",
        "control.heartbeat: 5 has no unit; allowed: a number and one of ns, us, ms, s, min, h, e.g. '200 ms'",
        "control.coordinator: '10.0.0.1:7400' is open to other machines and control connections would not be "
        "encrypted; allowed: ca_file and key_file, which 'ina keys' makes, a loopback address, unix:/path, or insecure "
        "= true with a token_file, where whoever sees the network may read the token and take over jobs",
        "local.socket: missing; required: path of the Unix socket that training processes connect to",
        "local.mode: 660 is not a file mode; allowed: e.g. '0660' or 0o660",
        "local.allow_users: 'alice' is not allowed; allowed: an array in brackets",
        "local.cpus[1]: '1' is not allowed; allowed: a whole number",
        "local.cpus[2]: -1 is not allowed; allowed: greater than or equal to 0",
        "lgo: unknown section (did you mean 'log'?); allowed: node, log, metrics, timing, impair, control, "
        "local, a2tp",
        "topology: unknown section (only ina-ps and ina-manager have it); allowed: node, log, metrics, timing, impair, "
        "control, local, a2tp",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[node\n", "not valid TOML: .*line 1"),
        ("[node]\nname = 1\n", "cannot tell which daemon this file is for"),
        ("node = 3\n[local]\n", "node: 3 is not a table; write \\[node\\]"),
        ("[control]\n[local]\n", "local.socket: missing; required"),
        ('[control]\ncoordinator = "fe80::1"\n', "looks like IPv6, which is not supported"),
        ('[control]\ncoordinator = "10.0.0.256"\n', "'10.0.0.256' is not an IPv4 address"),
        ('[control]\ncoordinator = "ps:http"\n', "the port 'http' is not a number"),
        ('[control]\ncoordinator = "ps:65536"\n', "the port '65536' is not a number from 0 to 65535"),
        ('[control]\ncoordinator = "unix:ps.sock"\n', "'ps.sock' is not an absolute path"),
        (f'[control]\ncoordinator = "unix:/{"x" * 107}"\n', "108 bytes long; allowed: 107"),
        ('[control]\ncoordinator = "-x"\n', "'-x' is not a host"),
        ('[control]\ncoordinator = "lo"\n[node]\nlisten = "unix:/a"\n', "a Unix socket cannot be used here"),
        ('[control]\ncoordinator = "lo"\ntoken = "short"\n', "the token has 5 characters; allowed: 16"),
        ('[control]\ncoordinator = "lo"\ntoken_file = "nosuch"\n', "cannot read .*/nosuch: No such file"),
        ('[control]\ncoordinator = "lo"\ntoken_file = "$INA_UNSET/a"\n', "a variable in it is not set"),
        (
            '[control]\ncoordinator = "lo"\nheartbeat = "11 s"\n',
            "30 s is shorter than three heartbeats.*33 s",
        ),
        (f'[control]\ncoordinator = "lo"\n[local]\nsocket = "/{"x" * 107}"\n', "108 bytes long"),
    ],
)
def test_refusals(tmp_path: Path, text: str, says: str) -> None:
    assert any(re.search(says, line) for line in problems(tmp_path, text))


def test_a_secret_is_never_repeated(tmp_path: Path) -> None:
    text = f'[control]\ninsecure = true\ncoordinator = "10.0.0.1"\ntoken = "{TOKEN}"\n'
    config = load(written(tmp_path, text))
    assert config.control.secret() == TOKEN
    assert TOKEN not in write_toml(config) + repr(config)
    wrong = problems(tmp_path, text.replace(f'"{TOKEN}"', "12345678901234567890"))
    assert wrong == ["control.token: the value is not allowed; allowed: a string in quotes"]


def test_the_token_file_is_read_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    text = '[control]\ninsecure = true\ncoordinator = "ps0:1"\ntoken_file = "$CREDENTIALS_DIRECTORY/token"\n'
    assert load(written(tmp_path, text)).control.secret() == TOKEN
    both = problems(tmp_path, text + f'token = "{TOKEN}"\n')
    assert both == ["control.token_file: token is set as well; allowed: one of the two"]


@pytest.mark.parametrize("address", ["unix:/run/ps.sock", "localhost:1", "lo", "127.9.9.9"])
def test_no_token_is_needed_on_this_machine(tmp_path: Path, address: str) -> None:
    text = f'[control]\nlisten = "{address}"\n[topology]\nworkers = [{{ name = "w", parent = "ps" }}]\n'
    control = load(written(tmp_path, text + '[node]\nname = "ps"\n')).control
    assert (control.listen.host or f"unix:{control.listen.path}", control.secret()) == (
        address.removesuffix(":1"),
        "",
    )


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = '[control]\ncoordinator = "lo"\n[local]\nsocket = "run/w.sock"\nmode = 0o660\n'
    config = load(written(tmp_path, text))
    assert isinstance(config, WorkerConfig)
    assert config.local.socket == str(tmp_path / "run/w.sock")
    assert config.local.mode == 0o660


def test_everything_wrong_with_a_topology_is_said(tmp_path: Path) -> None:
    text = """
[node]
name = "ps"
[topology]
aggregators = [
    { name = "a", parent = "b" },
    { name = "b", parent = "a" },
    { name = "b", parent = "a" },
]
workers = [{ name = "w", parent = ["a", "x"] }, { name = "v", parent = "w" }]
"""
    assert problems(tmp_path, text) == [
        "topology: 'b' stands there twice; names are used once",
        "topology: aggregators a -> b -> a form a circle",
        "topology: worker 'w' has parent 'x', which does not exist",
        "topology: worker 'v' has parent 'w', which is a worker",
    ]
    assert problems(tmp_path, "[topology]\nworkers = []\n") == [
        "topology: no workers; allowed: at least one { name, parent }"
    ]
    assert problems(tmp_path, '[topology]\nworkers = [{ name = "w" }]\n') == [
        "topology.workers[0].parent: missing; required: name of the aggregator or PS it sends to"
    ]


def test_a_topology_with_33_children_is_refused(tmp_path: Path) -> None:
    for count in (32, 33):
        nodes = ", ".join(f'{{ name = "w{index}", parent = "ps" }}' for index in range(count))
        text = f'[node]\nname = "ps"\n[topology]\nworkers = [{nodes}]\n'
        if count == 32:
            config = load(written(tmp_path, text))
            assert isinstance(config, PsConfig)
            assert len(config.topology.fabric("ps").workers) == 32
        else:
            assert "'ps' would have 33 children" in problems(tmp_path, text)[0]


def test_the_file_is_looked_for_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "etc"
    system.mkdir()
    monkeypatch.setattr(config_file, "SYSTEM_DIRECTORY", system)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"searched {tmp_path}/agg.toml, {system}/agg.toml"):
        find_file("agg.toml")
    (system / "agg.toml").touch()
    assert find_file("agg.toml") == system / "agg.toml"
    (tmp_path / "agg.toml").touch()
    assert find_file("agg.toml") == tmp_path / "agg.toml"
    with pytest.raises(ConfigError, match=f"no such file; searched {tmp_path}/etc/../x.toml$"):
        find_file("etc/../x.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load(system)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(b"[node]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="not UTF-8 text \\(byte 15\\)"):
        load(file)


@pytest.mark.parametrize("role", SHIPPED)
def test_what_is_printed_reads_back_as_the_same(tmp_path: Path, role: Role) -> None:
    config = load(CONFIGS / f"{role}.toml", role)
    assert load(written(tmp_path, write_toml(config)), role) == config


def test_odd_values_survive_printing(tmp_path: Path) -> None:
    text = (
        '[control]\ncoordinator = "lo"\ndrain_timeout = "1.5 ms"\n'
        '[local]\nsocket = "/tmp/\\u007fä\\"\\\\ .s"\nallow_users = ["alice", 1001]\n'
        '[impair]\ndrop = "0.1 %"\ndelay = "1 ns"\n[node]\nmemory = 1048577\n'
    )
    config = load(written(tmp_path, text))
    printed = write_toml(config)
    assert load(written(tmp_path, printed)) == config
    assert 'drain_timeout = "1500 us"' in printed
    assert 'memory = "1048577 B"' in printed


@pytest.mark.parametrize("role", SHIPPED)
def test_shipped_files_work_and_tell_the_truth_about_defaults(
    tmp_path: Path, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (CONFIGS / f"{role}.toml").read_text()
    shipped = load(CONFIGS / f"{role}.toml")
    assert type(shipped) is MODELS[role]
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    (tmp_path / "token").write_text(TOKEN)
    authority.initialise(tmp_path, 1)
    authority.issue(tmp_path, "key", roles=("ps",), coordinator=True, days=1)
    everything = re.sub(r"^# (\[\w+\]|\w+ = )", r"\1", text, flags=re.MULTILINE)
    full = load(written(tmp_path, everything))
    examples = {
        "token_file",
        "ca_file",
        "key_file",
        "revoked_file",
        "state_file",
        "allow_users",
        "cpus",
        "models",
    }
    examples |= {"listen", "rate", "rates", "burst"} - ({"rate"} if role == "manager" else set())
    sections: dict[str, Any] = {
        name: dict(getattr(full, name)) for name in type(full).model_fields if getattr(full, name) is not None
    }
    # token is the one key without a line: a token in a file of its own is the better way
    unwritten = {"token", "roots"} | {
        "ps": {"coordinator"},
        "manager": {"group_range", "group_port", "loss_threshold"},
    }.get(role, set())
    for name, section in sections.items():
        block = everything.partition(f"[{name}]\n")[2].partition("\n[")[0]
        keys = set(re.findall(r"^(\w+) =", block, re.MULTILINE))
        assert keys == set(section) - unwritten, name
        if name != "impair":
            for key in keys & set(section) - examples:
                assert section[key] == getattr(getattr(shipped, name), key), f"{name}.{key}"
    assert isinstance(full, ManagerConfig) or full.impair.active


@pytest.mark.parametrize(
    ("data", "role"),
    [
        ({"topology": {}}, "ps"),
        ({"control": {"listen": "lo"}}, "ps"),
        ({"control": {"coordinator": "lo"}, "local": {}}, "worker"),
        ({"control": {"coordinator": "lo"}}, "agg"),
        ({"control": {"listen": "lo"}, "fabric": {}}, "manager"),
        ({"planning": {}, "topology": {}}, "manager"),
        ({"control": 3}, None),
        ({}, None),
    ],
)
def test_roles_are_told_from_sections(data: dict[str, Any], role: Role | None) -> None:
    assert detect_role(data) == role


def test_overrides_replace_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, '[control]\ncoordinator = "lo"\n[log]\nlevel = "error"\nformat = "json"\n')
    config = load(file, "agg", {"log": {"level": "debug"}})
    assert (config.log.level, config.log.format) == ("debug", "json")
