"""The page of all keys is what the models say."""

from pathlib import Path

import pytest

from inanet.config.daemons import MODELS, Role
from inanet.config.reference import _notes, _sections, page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python -m inanet.config.reference > docs/configuration.md"


@pytest.mark.parametrize("role", MODELS)
def test_every_key_says_what_it_is_for(role: Role) -> None:
    missing = [
        f"{header} {name}"
        for header, model in _sections(MODELS[role])
        for name, field in model.model_fields.items()
        if not (_notes(model).get(name) or field.description)
    ]
    assert missing == []


def test_defaults_and_values_are_as_in_a_file() -> None:
    text = page()
    assert "| `rate` | rate |  | sent at most, in bits per second" in text
    assert '| `transport` | `"udp"`, `"rawip"`, `"packet"`, `"tun"` | `"udp"` |' in text
    assert '| `drain_timeout` | duration | `"1 s"` | how long what waits at the ports' in text
    assert "| `coordinator` | address, or `unix:/path` | required |" in text
