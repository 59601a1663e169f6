"""Names of nodes: what they may be. Imported by whoever reads configurations, which need no arrays."""

import re


def check_name(text: object) -> str:
    """The text, if it is a node's name. Raises ``ValueError``."""
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}", text, re.ASCII):
        raise ValueError(
            f"{text!r} is not a name; allowed: 1 to 128 letters, digits and ._:@+-, a letter or digit first"
        )
    return text
