"""Protocol rules are cited by name: every rule of docs/protocol.md is cited in the code, and no rule by a bare number."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = (
    "inanet",
    "daemons",
    "tests",
    "docs",
    "configs",
    "systemd",
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
)
SUFFIXES = {".py", ".c", ".h", ".md", ".toml", ".service", ".target"}
PAGE = ROOT / "docs" / "protocol.md"
#: rules were numbered once, up to 13; a number says nothing to who reads it
NUMBERED = re.compile(r"\bR(?:[1-9]|1[0-3])\b|\btest_r(?:[1-9]|1[0-3])_")


def texts(*places: str) -> Iterator[tuple[Path, str]]:
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file.is_file():
                yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


def rules() -> list[str]:
    """Names of the rules, as code cites them."""
    return re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_no_rule_is_cited_by_number() -> None:
    found = [
        f"{file}:{number}: {line.strip()}"
        for file, text in texts(*PLACES)
        for number, line in enumerate(text.splitlines(), 1)
        if NUMBERED.search(line)
    ]
    assert not found, "cite the rule's name in docs/protocol.md instead:\n" + "\n".join(found)


def test_every_rule_is_cited_by_code() -> None:
    code = " ".join(re.sub(r"[\s#]+", " ", text) for _, text in texts("inanet")).lower()
    uncited = [name for name in rules() if name.lower() not in code]
    assert len(rules()) > 30
    assert not uncited, "docs/protocol.md has rules that no code cites: " + ", ".join(uncited)


def test_links_to_rules_lead_to_headings() -> None:
    anchors = {name.lower().replace(" ", "-") for name in rules()}
    linked = {
        anchor
        for file, text in texts("docs", "README.md")
        for anchor in re.findall(
            r"\]\(#([^)]+)\)" if file == PAGE.relative_to(ROOT) else r"\]\((?:docs/)?protocol\.md#([^)]+)\)",
            text,
        )
    }
    assert linked <= anchors, linked - anchors
