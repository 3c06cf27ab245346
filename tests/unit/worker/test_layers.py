"""The worker's import order: service → node → roles → engine contract ← engines."""

import ast
from functools import cache
from pathlib import Path

import pytest

import kvmesh.worker.engine

PACKAGE = "kvmesh.worker."
ROOT = Path(kvmesh.worker.engine.__file__).parent
LEAVES = {"clearing", "scratch"}
CONTRACT = {"engine", "capabilities"}
ENGINE_PARTS = {
    "adapters",
    "constraints",
    "enginecore",
    "images",
    "lora",
    "metrics",
    "model_folder",
    "start",
    *CONTRACT,
}
ALLOWED = {
    "scratch": set[str](),
    "clearing": set(),
    "compiled": set(),
    "enginecore": set(),
    "start": set(),
    "engine": {"clearing", "start"},
    "images": {"engine", "model_folder"},
    "capabilities": {"clearing", "engine", "enginecore", "images"},
    "abilities": set(CONTRACT),
    "model_folder": {"engine"},
    "metrics": {"capabilities", "enginecore"},
    "constraints": {"engine"},
    "adapters": {"constraints", "engine", "enginecore", *LEAVES},
    "lora": set(CONTRACT),
    "engines": {*ENGINE_PARTS, *LEAVES},
    "health": {"engine", "enginecore"},
    "requests": {"constraints", *CONTRACT},
    "control": {"lora", "requests", "roles", *CONTRACT},
    "roles": set(CONTRACT),
    "model_card": {"engine", "model_folder"},
    "models": {"compiled", "engine", "start", "weights", *LEAVES},
    "node": {
        *CONTRACT,
        *("control", "enginecore", "health", "lora", "model_card", "requests"),
        *("roles", "start"),
    },
    "lifecycle": {"health", "lora", "model_card", "node", "requests", "start", *CONTRACT},
    "weights": {"compiled", "model_card", "model_folder", "requests"},
    "service": {
        *("compiled", "engine", "lifecycle", "metrics", "model_card", "model_folder", "models"),
        *("start", "weights"),
    },
}
FILES = sorted(file for file in ROOT.rglob("*.py") if file.name != "__init__.py")


@cache
def imports(file: Path) -> list[str]:
    """The worker's modules that a file imports, without the package's name."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [name.removeprefix(PACKAGE) for name in names if name.startswith(PACKAGE)]
    return found


def part(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[0]


def test_every_part_has_a_place_in_the_order() -> None:
    assert {part(file) for file in FILES} == set(ALLOWED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_follow_the_order(file: Path) -> None:
    allowed = {part(file), *ALLOWED[part(file)]}
    assert {name.partition(".")[0] for name in imports(file)} <= allowed


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_engine_imports_another_one(file: Path) -> None:
    own = file.relative_to(ROOT).parts
    for name in imports(file):
        names = name.split(".")
        if own[0] == names[0] == "engines" and len(own) > 2:
            assert names[1] in {own[1], "engine_tiers", "retention_settings"}, name
