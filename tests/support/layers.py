"""Checks of a package's layers by its import statements."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def upward_imports(package: str, layers: Sequence[Sequence[str]]) -> list[str]:
    """Imports within `kvmesh.<package>`, a service or a library, that do not lead to a lower layer.

    `layers` are listed from top to bottom, each with its modules and subpackages. Within a
    subpackage all imports are allowed.
    """
    level = {name: depth for depth, layer in enumerate(layers) for name in layer}
    found = []
    for part, path, module in _imports(package):
        if not module.startswith(f"kvmesh.{package}."):
            continue
        target = module.split(".")[2]
        if target != part and level.get(target, -1) <= level.get(part, len(layers)):
            found.append(f"{path.name}: {part} imports {target}")
    return found


def imports_of(package: str, parts: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Imports of `modules`, by top-level name, in some modules or subpackages."""
    return [
        f"{path.name} imports {module}"
        for part, path, module in _imports(package)
        if part in parts and module.split(".")[0] in modules
    ]


def modules_of(package: str) -> set[str]:
    """Its top-level modules and subpackages."""
    return {part for part, _ in _files(package)}


def _files(package: str) -> Iterator[tuple[str, Path]]:
    folder = ROOT / "services" / package / "kvmesh" / package
    if not folder.exists():
        folder = ROOT / "libs" / "kvmesh" / package
    for path in sorted(folder.rglob("*.py")):
        if path.stem != "__init__":
            yield path.relative_to(folder).with_suffix("").parts[0], path


def _imports(package: str) -> Iterator[tuple[str, Path, str]]:
    for part, path in _files(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == f"kvmesh.{package}":
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                for name in names:
                    yield part, path, name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield part, path, alias.name
