"""What topology files may say, and how they are refused."""

from collections.abc import Callable

import pytest

from inanet.config.file import ConfigError
from inanet.lab.model import Topology

Parse = Callable[[str], Topology]

HEAD = 'name = "t"\nsummary = "s"\n'
SWITCH = '[[switch]]\nname = "s0"\n'
PS = '[[host]]\nname = "ps"\nrole = "ps"\nswitch = "s0"\n'
WORKER = '[[host]]\nname = "w"\nswitch = "s0"\n'


def problems(parse: Parse, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return [str(problem) for problem in caught.value.problems]


def test_counts_unfold_and_links_are_completed(pair: Topology) -> None:
    hosts = {host.name: host for host in pair.hosts()}
    assert list(hosts) == ["ps", "w0", "w1"]
    assert (hosts["w1"].link.rate, hosts["w1"].link.burst) == (400_000_000, 150_000)
    assert (hosts["w1"].link.latency, hosts["w1"].link.mtu) == (0.02, 1500)
    assert (hosts["ps"].link.rate, hosts["ps"].link.latency) == (800_000_000, 0.01)


def test_directions_of_a_link_may_differ_and_fall_back_to_its_rate(parse: Parse) -> None:
    text = HEAD + '[link]\nrate = "1 Gbit/s"\n' + SWITCH + PS + WORKER
    both = parse(text + 'link = { up = "2 Gbit/s", down = "500 Mbit/s" }\n').workers()[0].link
    assert (both.sends, both.receives) == (2 * 10**9, 5 * 10**8)
    up = parse(text + 'link = { up = "2 Gbit/s" }\n').workers()[0].link
    assert (up.sends, up.receives, up.mtu) == (2 * 10**9, 10**9, 1500)
    alone = parse(HEAD + SWITCH + PS + WORKER + 'link = { down = "2 Gbit/s" }\n').workers()[0].link
    assert (alone.sends, alone.receives) == (None, 2 * 10**9)
    trunk = '[[switch]]\nname = "s1"\n[[trunk]]\nbetween = ["s0", "s1"]\nlink = { up = "1 Gbit/s" }\n'
    assert "trunk[0].link.up: unknown key" in problems(parse, text + trunk)[0]


def test_workers_send_to_every_root_unless_told_otherwise(parse: Parse) -> None:
    text = HEAD + SWITCH + PS.replace('"ps"\nrole', '"ps"\ncount = 2\nrole') + WORKER
    topology = parse(text)
    assert topology.trees() == {
        "roots": ["ps0", "ps1"],
        "aggregators": [],
        "workers": [{"name": "w", "parent": ["ps0", "ps1"]}],
    }


def test_every_malformed_part_is_reported_at_once(parse: Parse) -> None:
    text = (
        'name = "T.1"\nsumary = "s"\n[link]\nrate = "1 Gbit"\nburst = "60 kB"\nmtu = 9\n'
        '[[switch]]\nname = "s0"\nsnooping = false\nquerier = true\n'
        '[[host]]\nname = "w-1"\nrole = "boss"\nswitch = "s0"\nlink = { rate = "64 Gbit/s" }\n'
    )
    found = "\n".join(problems(parse, text))
    for expected in (
        "name: 'T.1' is not a name",
        "sumary: unknown section (did you mean 'summary'?)",
        "summary: missing",
        "link.rate: '1 Gbit' has the unknown unit 'Gbit'",
        "link.burst: 60000 B is out of range; allowed: 140000 B to 64 MiB",
        "link.mtu: 9 is not allowed",
        "switch[0]: querier = true needs snooping = true",
        "host[0].name: 'w-1' is not a name",
        "host[0].role: 'boss' is unknown",
        "host[0].link.rate: 64 Gbit/s is out of range; allowed: 1 Mbit/s to 32 Gbit/s",
    ):
        assert expected in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SWITCH + WORKER + WORKER, "name 'w' is used more than once"),
        (SWITCH + WORKER.replace("s0", "s9"), "host 'w': there is no switch 's9'; allowed: s0"),
        (SWITCH + PS + WORKER.replace('"w"', '"longname123"') + "count = 2\n", "too long with its number"),
        (SWITCH + PS + "ranks = 2\n" + WORKER, "host 'ps' is ps; allowed: ranks and lateness for workers"),
        (SWITCH + PS + 'parent = "w"\n' + WORKER, "host 'ps' is ps; allowed: a parent for workers"),
        (SWITCH + PS + WORKER + 'parent = "agg"\n', "worker 'w' has parent 'agg', which does not exist"),
        (SWITCH + WORKER + 'parent = "ps"\n', "there is no host with the role 'ps'"),
        (SWITCH + PS, "there is no worker"),
        (SWITCH + SWITCH.replace("s0", "s1") + WORKER, "the switches do not form one network"),
        (SWITCH + WORKER + '[[trunk]]\nbetween = ["s0", "s0"]\n', "joins a switch with itself"),
        (SWITCH + WORKER + '[[trunk]]\nbetween = ["s0", "s7"]\n', "trunk s0-s7: there is no switch s7"),
    ],
)
def test_contradictions_are_refused(parse: Parse, text: str, expected: str) -> None:
    assert expected in "\n".join(problems(parse, HEAD + text))


def test_contradictions_are_all_reported(parse: Parse) -> None:
    found = problems(parse, HEAD + SWITCH + WORKER + WORKER + '[[trunk]]\nbetween = ["s0", "s0"]\n')
    assert len(found) == 2


def test_loops_need_a_routed_fabric(parse: Parse) -> None:
    switches = "".join(f'[[switch]]\nname = "s{number}"\n' for number in range(3))
    trunks = "".join(
        f'[[trunk]]\nbetween = ["{a}", "{b}"]\n' for a, b in (("s0", "s1"), ("s1", "s2"), ("s2", "s0"))
    )
    (found,) = problems(parse, HEAD + switches + WORKER + trunks)
    assert "trunk s2-s0 closes a loop" in found
    assert parse(HEAD + 'fabric = "routed"\n' + switches + WORKER + trunks).fabric == "routed"
