"""The documentation is true where a machine can tell: links lead somewhere, and files that pages name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: in instructions a capital name stands for the reader's own
PLACEHOLDER = re.compile(r"\bNAME\b")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{page.name}: {link}: no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{page.name}: {link}: no such heading"


def missing_files(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"`((?:inanet|daemons|tests|configs|systemd|docs)/[\w/.*-]+)`", text))):
        if not PLACEHOLDER.search(name) and not any(ROOT.glob(name.rstrip("/"))):
            yield f"{page.name}: {name}"


def test_links_lead_to_files_and_headings() -> None:
    broken = [line for page in PAGES for line in broken_links(page)]
    assert not broken, "\n".join(broken)


def test_files_named_in_pages_exist() -> None:
    missing = [line for page in PAGES for line in missing_files(page)]
    assert not missing, "pages name files that are not there:\n" + "\n".join(missing)


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    unlinked = [page.name for page in PAGES[1:] if str(page.relative_to(ROOT)) not in linked]
    assert not unlinked, "README.md does not lead to " + ", ".join(unlinked)
