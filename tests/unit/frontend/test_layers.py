"""The layers of the frontend: imports point down, never up or sideways."""

import ast
from collections.abc import Iterator
from pathlib import Path

import kvmesh.frontend.service

ROOT = Path(kvmesh.frontend.service.__file__).parent
PACKAGE = "kvmesh.frontend"
LAYERS = [
    {"__main__"},
    {"service"},
    {"no_bus"},
    {"http", "prefork"},
    {"batches", "sessions", "pooling"},
    {"generation"},
    {"dispatch"},
    {"wake"},
    {"preprocess"},
    {"models"},
    {"aliases", "answers", "cache_account"},
    {"dialects", "apis", "auth", "tokenizer"},
    {"namespaces", "json_bounds"},
    {"metrics"},
    {"conversation", "errors", "fair_threads", "tenant_figures", "failure_log"},
    {"turn_memo"},
]
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}


def imports() -> Iterator[tuple[str, str]]:
    """Pairs of importing and imported modules of the frontend, type-only imports included."""
    for file in ROOT.rglob("*.py"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith(f"{PACKAGE}."):
                    yield module, name.removeprefix(f"{PACKAGE}.")


def top(module: str) -> str:
    return module.partition(".")[0]


def test_every_package_has_a_layer() -> None:
    names = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__pycache__"} == set(DEPTH)


def test_imports_point_down() -> None:
    found = {
        (module, name)
        for module, name in imports()
        if top(module) != top(name) and DEPTH[top(name)] <= DEPTH[top(module)]
    }
    assert found == set()


def test_apis_read_neither_clock_nor_random_numbers() -> None:
    impure = {"time", "secrets", "random", "uuid", "os", "datetime"}
    for file in (ROOT / "apis").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module or ""}
            else:
                continue
            assert not names & impure, f"{file.name} imports {names & impure}"
