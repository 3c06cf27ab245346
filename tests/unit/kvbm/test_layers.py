"""Layers of the kvbm: imports go down only, and the core has neither I/O nor a clock."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvmesh.kvbm.core.manager

PACKAGE = "kvmesh.kvbm"
ROOT = Path(kvmesh.kvbm.core.manager.__file__).parents[1]
LAYERS = [
    ["core"],
    ["tiers"],
    ["peers", "request_trace"],
    ["worker_server", "control_server", "remote_sources", "presence"],
    ["node", "metrics"],
    ["service"],
]
CORE_LAYERS = [
    ["errors"],
    ["blocks"],
    ["returns", "config"],
    ["retention"],
    ["transfers"],
    ["attachment", "clearing"],
    ["manager"],
]
TRANSFER_LAYERS = [
    ["in_progress"],
    ["mesh_claims"],
    ["tickets"],
    ["loadable_prefix"],
    ["announcing"],
    ["loading", "offload", "restoring"],
    ["onboarding", "write_through"],
    ["lending"],
]
FORBIDDEN_IN_CORE = {"asyncio", "logging", "nats", "os", "socket", "threading", "time"}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all imported modules, with the names imported from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def check(layers: list[list[str]], folder: str) -> None:
    """Modules and packages of a folder import only their own and lower layers."""
    floors = {name: floor for floor, names in enumerate(layers) for name in names}
    prefix = ".".join(filter(None, (PACKAGE, folder.replace("/", ".")))) + "."
    for path in modules():
        if not path.is_relative_to(ROOT / folder):
            continue
        own = path.relative_to(ROOT / folder).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith(prefix):
                other = name.removeprefix(prefix).split(".")[0]
                assert other == own or floors[other] < floors[own], f"{path} imports {name}"


@pytest.mark.parametrize(
    ("layers", "folder"),
    [(LAYERS, ""), (CORE_LAYERS, "core"), (TRANSFER_LAYERS, "core/transfers")],
    ids=["kvbm", "core", "transfers"],
)
def test_imports_go_down(layers: list[list[str]], folder: str) -> None:
    check(layers, folder)


def test_the_core_has_neither_io_nor_a_clock() -> None:
    for path in modules():
        if path.is_relative_to(ROOT / "core"):
            roots = {name.split(".")[0] for name in imports(path)}
            assert not roots & FORBIDDEN_IN_CORE, path


def test_peers_use_the_arena_and_nothing_else_of_the_tiers() -> None:
    used = {
        ".".join(name.split(".")[:4])
        for path in modules()
        if path.is_relative_to(ROOT / "peers")
        for name in imports(path)
        if name.startswith(f"{PACKAGE}.tiers.")
    }
    assert used == {f"{PACKAGE}.tiers.arena"}
