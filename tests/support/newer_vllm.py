"""Lays the Python code of a newer vLLM over the CPU build's compiled code, and says what changed.

`python -m support.newer_vllm VERSION FOLDER`, run in `tests/` where the CPU build is installed,
downloads vLLM's wheel of that version, if `FOLDER/VERSION` does not exist, and makes `vllm` there:
with this folder in `PYTHONPATH` and `VLLM_TARGET_DEVICE=cpu`, vLLM runs on the CPU as far as the
compiled code fits.
It then prints each part of vLLM on which kvmesh relies that differs between the two.
"""

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path

WHOLE = [""]
# Modules of vLLM and what kvmesh calls, replaces or imitates there.
RELIED_ON: dict[str, list[str]] = {
    "config/cache.py": ["CacheConfig.kv_offloading_size", "CacheConfig.kv_offloading_backend"],
    "config/kv_transfer.py": WHOLE,
    "config/vllm.py": [
        "VllmConfig._post_init_kv_transfer_config",
        "VllmConfig._verify_kv_transfer_compat",
        "VllmConfig.num_hash_lookahead_tokens",
    ],
    "distributed/kv_events.py": WHOLE,
    "distributed/kv_transfer/kv_connector/factory.py": ["KVConnectorFactory"],
    "distributed/kv_transfer/kv_connector/v1/base.py": ["KVConnectorBase_V1", "SupportsHMA"],
    "distributed/kv_transfer/kv_connector/v1/metrics.py": WHOLE,
    "distributed/kv_transfer/kv_connector/v1/multi_connector.py": WHOLE,
    "exceptions.py": WHOLE,
    "outputs.py": ["RequestOutput.__init__", "CompletionOutput"],
    "plugins/endpoint_plugins/interface.py": WHOLE,
    "v1/core/block_pool.py": ["BlockPool", "BlockHashToBlockMap"],
    "v1/core/kv_cache_utils.py": ["FreeKVCacheBlockQueue", "KVCacheBlock"],
    "v1/core/sched/scheduler.py": [
        "Scheduler.__init__",
        "Scheduler.make_stats",
        "Scheduler.reset_prefix_cache",
    ],
    "v1/engine/async_llm.py": ["AsyncLLM.generate", "AsyncLLM.from_vllm_config"],
    "v1/engine/core_client.py": [
        "AsyncMPClient.call_utility_async",
        "DPLBAsyncMPClient.call_utility_async",
    ],
    "v1/engine/exceptions.py": WHOLE,
    "v1/metrics/cache_hit_source.py": WHOLE,
    "v1/metrics/loggers.py": ["StatLoggerBase"],
    "v1/metrics/stats.py": ["PrefixCacheStats", "SchedulerStats"],
    "v1/request.py": ["Request.__init__", "Request.update_block_hashes"],
}


def lay_over(version: str, folder: Path, base: Path) -> None:
    """Make `folder/vllm`: the wheel's Python files, and the compiled ones of `base`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        print(f"downloading vLLM {version}", flush=True)
        subprocess.run(
            [*pip, "download", "--no-deps", "--dest", made, f"vllm=={version}"], check=True
        )
        (wheel,) = made.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(made / "tree", names)
        # the CPU build has it in another form, and cannot load what is not there
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", made / "tree", "orjson"], check=True
        )
        for compiled in base.rglob("*.so*"):
            target = made / "tree" / "vllm" / compiled.relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(compiled, target)
        (made / "tree").rename(folder)


def changes(old: Path, new: Path) -> Iterator[tuple[str, list[str]]]:
    """Each part of RELIED_ON that differs, with the lines of its difference."""
    for module, names in RELIED_ON.items():
        before, after = _parts(old / module, names), _parts(new / module, names)
        for name in names:
            if before.get(name) != after.get(name):
                one = before.get(name, "(absent)").splitlines()
                two = after.get(name, "(absent)").splitlines()
                yield f"{module} {name}".strip(), list(unified_diff(one, two, lineterm="", n=1))[2:]


def _parts(path: Path, names: list[str]) -> dict[str, str]:
    """The code of the named parts, without comments and docstrings."""
    if not path.exists():
        return {}
    tree = _Bare().visit(ast.parse(path.read_text()))
    if names == WHOLE:
        return {"": ast.unparse(tree)}
    found: dict[str, str] = {}
    for node in tree.body:
        outer = getattr(node, "name", "")
        for part, name in [(node, outer), *((m, f"{outer}.{_name(m)}") for m in _body(node))]:
            if name in names:
                found[name] = ast.unparse(part)
    return found


class _Bare(ast.NodeTransformer):
    """Removes docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | ast.Pass:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else node


def _body(node: ast.AST) -> list[ast.stmt]:
    return node.body if isinstance(node, ast.ClassDef) else []


def _name(node: ast.stmt) -> str:
    return getattr(node, "name", "") or getattr(getattr(node, "target", None), "id", "")


def main(version: str, root: Path) -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("the CPU build of vLLM is not installed here: `make vllm` installs it")
    base, folder = Path(spec.origin).parent, root / version
    if not folder.exists():
        lay_over(version, folder, base)
    found = list(changes(base, folder / "vllm"))
    for part, lines in found:
        print(f"\n=== {part}", *lines, sep="\n")
    total = sum(map(len, RELIED_ON.values()))
    print(f"\n{len(found)} of {total} parts of vLLM that kvmesh relies on differ in {version}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
