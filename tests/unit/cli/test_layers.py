"""Import layers: tools import services and libraries, services libraries, libraries neither."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVICES = {folder.name for folder in (ROOT / "services").iterdir() if folder.is_dir()}
TOOLS = {folder.name for folder in (ROOT / "tools" / "kvmesh").iterdir() if folder.is_dir()}


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """Line and module of each import, function-level and type-checking ones included."""
    found = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


def violations(folder: Path, forbidden: set[str]) -> list[str]:
    """Imports of the forbidden packages below `kvmesh`."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for line, module in imports(file):
            names = module.split(".")
            if names[0] == "kvmesh" and len(names) > 1 and names[1] in forbidden:
                found.append(f"{file.relative_to(ROOT)}:{line}: {module}")
    return found


def test_the_layout_is_as_expected() -> None:
    assert {"frontend", "indexer", "kvbm", "router", "worker"} <= SERVICES
    assert {"cli", "simulator", "workload"} <= TOOLS


def test_services_do_not_import_each_other() -> None:
    found = [
        violation
        for service in SERVICES
        for violation in violations(ROOT / "services" / service, SERVICES - {service})
    ]
    assert found == []


def test_services_do_not_import_tools() -> None:
    assert violations(ROOT / "services", TOOLS) == []


def test_libraries_import_neither_services_nor_tools() -> None:
    assert violations(ROOT / "libs" / "kvmesh", SERVICES | TOOLS) == []


def test_workloads_import_no_service_and_no_other_tool() -> None:
    """Workloads stay usable without the mesh; their tables are like those of all commands."""
    folder = ROOT / "tools" / "kvmesh" / "workload"
    assert violations(folder, SERVICES | TOOLS - {"workload", "terminal"}) == []


def test_what_prints_tables_knows_no_mesh() -> None:
    folder = ROOT / "tools" / "kvmesh" / "terminal"
    assert violations(folder, SERVICES | TOOLS - {"terminal"}) == []


def test_the_simulator_does_not_import_the_command_line() -> None:
    assert violations(ROOT / "tools" / "kvmesh" / "simulator", {"cli"}) == []
