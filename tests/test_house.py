"""How the code lies: every module has a user, modules form no circle, and a class that is inherited has more than one heir or a
use of its own.

What is listed here as still failing may only shrink. That rules are cited by name is :mod:`tests.test_protocol_names`' business.
"""

import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("inanet", "daemons")
#: modules that only tests import
UNUSED: set[str] = set()
#: modules that import each other, if only for their types
CIRCLES: set[tuple[str, ...]] = set()
#: classes with one heir that nothing else names
INHERITED_ONCE: set[str] = set()
#: where commands and other programs' entry points are named
ENTRIES = ("pyproject.toml", "systemd", ".ci/run")


@dataclass(slots=True)
class Module:
    """What is needed of a module: its tree has thousands of objects, which every collection would look at from then on."""

    #: dotted names that it imports, and those that it has as text such as ``"inanet.cli.main:main"``
    imports: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    #: bases of its classes, and how often it names what
    classes: list[tuple[str, set[str]]] = field(default_factory=list)
    mentions: Counter[str] = field(default_factory=Counter)
    runnable: bool = False

    def read(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                self.mentions[node.id] += 1
            elif isinstance(node, ast.Attribute):
                self.mentions[node.attr] += 1
            elif isinstance(node, ast.Import):
                self.imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.texts |= set(re.findall(r"\b(?:inanet|daemons)(?:\.\w+)+", node.value.partition(" ")[0]))
            elif isinstance(node, ast.ClassDef):
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                names = {
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                    for base in bases
                }
                self.classes.append((node.name, names))
        self.runnable = any(
            isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body
        )


@cache
def modules() -> dict[str, Module]:
    """Modules by name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module()
            found[name].read(ast.parse(file.read_text(encoding="utf-8")))
    return found


def test_every_module_is_imported() -> None:
    used = {other for name, one in modules().items() for other in one.imports | one.texts if other != name}
    for place in ENTRIES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            used |= set(re.findall(r"\b(?:inanet|daemons)(?:\.\w+)+", file.read_text(encoding="utf-8")))
    packages = {name.rpartition(".")[0] for name in modules()}
    runnable = {name for name, one in modules().items() if one.runnable}
    # what tests are made with
    support = {name for name in modules() if name.startswith("inanet.testing.")}
    unused = modules().keys() - used - packages - runnable - support
    assert unused == UNUSED, f"nobody imports these, or they need not be listed: {sorted(unused ^ UNUSED)}"


def test_modules_form_no_circle() -> None:
    imports = {name: one.imports & modules().keys() - {name} for name, one in modules().items()}
    # a package is named with each of its modules
    for name, others in imports.items():
        imports[name] = {other for other in others if not any(one.startswith(f"{other}.") for one in others)}
    reach = {name: set(others) for name, others in imports.items()}
    grown = True
    while grown:
        grown = False
        for others in reach.values():
            more = set().union(*(reach[other] for other in others)) - others
            others |= more
            grown = grown or bool(more)
    circles = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in reach
        if name in reach[name]
    }
    assert circles == CIRCLES, (
        f"modules import each other, or need not be listed: {sorted(circles ^ CIRCLES)}"
    )


def test_no_class_exists_to_be_inherited_once() -> None:
    heirs: dict[str, list[str]] = defaultdict(list)
    mentions: Counter[str] = Counter()
    classes = {}
    for module, one in modules().items():
        mentions.update(one.mentions)
        for heir, bases in one.classes:
            classes[heir] = bases
            for base in bases:
                heirs[base].append(f"{module}.{heir}")
                mentions[base] -= 1
    once = {
        name
        for name, names in classes.items()
        if len(heirs[name]) == 1 and mentions[name] <= 0 and "Protocol" not in names
    }
    assert once == INHERITED_ONCE, (
        f"these have one heir and no other use, or need not be listed: {sorted(once ^ INHERITED_ONCE)}; "
        "let the heir have them as parts, or be one class with them"
    )
