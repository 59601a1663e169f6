"""Single keys of a file's text are changed; all else stays as it was written."""

import pytest

from inanet.config.edit import drop_section, set_keys

TEXT = """\
# about the file
[node]
name = "w0"  # ours
# listen = "127.0.0.1"

# [control]
# coordinator = "127.0.0.1:7400"

[topology]
# who
workers = [
    { name = "w0", parent = "ps" },  # the first
]
rate = "1 Gbit/s"
"""


def test_keys_take_the_place_of_their_values_or_of_the_comment_that_shows_their_default() -> None:
    changed = set_keys(TEXT, "node", {"name": "h1", "listen": "eth0:7410"})
    assert changed == TEXT.replace('name = "w0"  # ours', 'name = "h1"').replace(
        '# listen = "127.0.0.1"', 'listen = "eth0:7410"'
    )
    assert set_keys(changed, "node", {"name": "h1", "listen": "eth0:7410"}) == changed


def test_a_section_behind_a_comment_comes_into_force() -> None:
    changed = set_keys(TEXT, "control", {"coordinator": "ps:7400", "insecure": True})
    assert '\n[control]\ninsecure = true\ncoordinator = "ps:7400"\n' in changed
    assert set_keys("", "control", {"insecure": True}) == "\n[control]\ninsecure = true\n"


def test_an_array_on_several_lines_is_replaced_as_a_whole() -> None:
    workers = [{"name": "a", "parent": "b"}]
    changed = set_keys(TEXT, "topology", {"workers": workers})
    assert changed.endswith('workers = [\n    { name = "a", parent = "b" },\n]\nrate = "1 Gbit/s"\n')
    assert set_keys(TEXT, "topology", {"workers": None}).endswith(
        '#     { name = "w0", parent = "ps" },  # the first\n# ]\nrate = "1 Gbit/s"\n'
    )


def test_what_cannot_be_changed_by_lines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot change node\.name in this file: write name = \"a\" there"):
        set_keys('node.name = "w0"\n', "node", {"name": "a"})


def test_a_dropped_section_is_left_as_a_comment() -> None:
    dropped = drop_section(TEXT, "topology")
    assert "# [topology]\n# who\n# workers = [\n" in dropped
    assert drop_section(dropped, "topology") == dropped
