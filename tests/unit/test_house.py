"""Conventions that hold in the whole source tree."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERROGATIVES = ("What", "Which", "Who", "Whose", "How", "Where", "Whether", "Why", "When")
# Folders whose docstrings are still to be edited.
PENDING = (
    "libs/kvmesh/bus",
    "libs/kvmesh/runtime",
    "services/frontend",
    "services/indexer",
    "services/kvbm",
    "services/router",
    "services/worker",
    "tools",
)


def modules() -> list[Path]:
    """All source modules, relative to the root."""
    found = [path for top in ("libs", "services", "tools") for path in (ROOT / top).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found)


def is_pending(module: Path) -> bool:
    return any(module.is_relative_to(folder) for folder in PENDING)


def test_public_classes_have_unique_names() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in ast.parse((ROOT / module).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(module))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize("module", [m for m in modules() if not is_pending(m)], ids=str)
def test_no_docstring_begins_with_an_interrogative(module: Path) -> None:
    tree = ast.parse((ROOT / module).read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)
    ]
    assert [
        text
        for text in docstrings
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in INTERROGATIVES
    ] == []


MOST_MODULES = 14
# Folders beyond the bound, with the reason.
LARGE = {
    "libs/kvmesh/bus": "one connection and its few abstractions, each in a small module",
    "tools/kvmesh/cli/commands": "one module per command",
}


def test_no_folder_holds_too_many_modules() -> None:
    folders = Counter(str(m.parent) for m in modules() if m.name != "__init__.py")
    assert {folder for folder, count in folders.items() if count > MOST_MODULES} == set(LARGE)
