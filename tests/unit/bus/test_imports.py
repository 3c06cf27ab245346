"""nats-py stays behind the bus: no other package or tool imports it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("libs", "services", "tools", "benchmarks")
BUS = ROOT / "libs" / "kvmesh" / "bus"
PACKAGES = {"nats", "nkeys"}
# `kvmesh secure` makes nkeys without a connection; benchmarks compare the bus with nats-py, and
# listen to all that travels
ALLOWED = {
    ("tools/kvmesh/cli/credentials/folder.py", "nkeys"),
    ("tools/kvmesh/cli/credentials/tokens.py", "nkeys"),
    ("benchmarks/bus_traffic.py", "nats"),
    ("benchmarks/bus_costs.py", "nats"),
}


def imported(file: Path) -> set[str]:
    """The clients of NATS that a file imports, at any depth of its code."""
    found: set[str] = set()
    text = file.read_text()
    if not any(package in text for package in PACKAGES):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found & PACKAGES


def test_only_the_bus_imports_nats() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert files
    outside = {
        (file.relative_to(ROOT).as_posix(), package)
        for file in files
        if not file.is_relative_to(BUS)
        for package in imported(file)
    }
    assert outside == ALLOWED


def test_services_and_tools_use_no_raw_client() -> None:
    raw = ("bus.client.", ".js.context")
    files = [file for folder in ("services", "tools") for file in (ROOT / folder).rglob("*.py")]
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "import" not in line and any(part in line for part in raw)
    ]
    assert found == []
