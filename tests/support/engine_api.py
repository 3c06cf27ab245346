"""The recorded interfaces of SGLang and TensorRT-LLM, from which their stand-ins are made.

A record holds the parameters of functions and the fields of classes that the adapters use, in
order; a name that ends in "?" is optional, and keyword-only ones follow "*". `payloads` are KV
events as the package encodes them. `python -m support.engine_api sglang [ROOT]`, run in tests/,
prints the record of the installed package, or of one unpacked in ROOT. It reads the package's
sources and executes only the definitions of its events, so it needs neither a GPU nor the packages
that SGLang imports. TensorRT-LLM's record was written by hand: PyPI has no wheel of it.
"""

import ast
import enum
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional, TypeAlias, Union

import msgspec
from msgspec import Struct

FOLDER = Path(__file__).parent.parent / "data"
DISTRIBUTIONS = {"sglang": "sglang", "tensorrt_llm": "tensorrt-llm"}
SGLANG = {
    "Engine.async_generate": "srt/entrypoints/engine.py",
    "Engine.shutdown": "srt/entrypoints/engine.py",
    "TokenizerManager.abort_request": "srt/managers/tokenizer_manager.py",
    "TokenizerControlMixin.flush_cache": "srt/managers/tokenizer_control_mixin.py",
    "TokenizerControlMixin.clear_hicache_storage": "srt/managers/tokenizer_control_mixin.py",
    "TokenizerControlMixin.close_session": "srt/managers/tokenizer_control_mixin.py",
    "CloseSessionReqInput": "srt/managers/io_struct.py",
    "FlushCacheReqOutput": "srt/managers/io_struct.py",
    "ClearHiCacheReqOutput": "srt/managers/io_struct.py",
    "GenerateReqInput": "srt/managers/io_struct.py",
    "SchedulerInitResult": "srt/entrypoints/engine.py",
    "SamplingParams": "srt/sampling/sampling_params.py",
    "KVEventsConfig": "srt/disaggregation/kv_events.py",
    "BlockStored": "srt/disaggregation/kv_events.py",
    "BlockRemoved": "srt/disaggregation/kv_events.py",
    "AllBlocksCleared": "srt/disaggregation/kv_events.py",
    "ServerArgs": "srt/arg_groups/fields",
}
TENSORRT_LLM = {
    "BaseLLM.generate_async": "llmapi/llm.py",
    "BaseLLM.get_kv_cache_events_async": "llmapi/llm.py",
    "BaseLLM.get_stats_async": "llmapi/llm.py",
    "DisaggregatedParams": "disaggregated_params.py",
    "KvCacheConfig": "llmapi/llm_args.py",
    "SamplingParams": "sampling_params.py",
    "GuidedDecodingParams": "sampling_params.py",
}
SOURCES = {"sglang": SGLANG, "tensorrt_llm": TENSORRT_LLM}
_EVENTS = ("EventBatch", "KVCacheEvent", "StorageMedium")
_EVENT_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Record(Struct, frozen=True):
    """The recorded interface of one version; `source` tells its origin."""

    package: str
    version: str
    source: str
    names: dict[str, list[str]]
    payloads: dict[str, Any] = {}

    def optional(self, name: str) -> dict[str, bool]:
        """The parameters or fields of a function or class; True if one is optional."""
        return {
            field.removesuffix("?"): field.endswith("?")
            for field in self.names[name]
            if field != "*"
        }

    def check(self, name: str, given: Any) -> None:
        """Raise TypeError as a call with the names in `given` would."""
        known = self.optional(name)
        if unknown := set(given) - set(known):
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown.pop()!r}")
        if missing := {field for field, optional in known.items() if not optional} - set(given):
            raise TypeError(f"{name}() missing a required argument: {missing.pop()!r}")


def recorded_class(record: Record, name: str, **defaults: Any) -> type[Any]:
    """A class with the recorded fields of `name`; those without a default start as None."""
    fields = list(record.optional(name))

    def initialise(self: Any, *args: Any, **given: Any) -> None:
        values = dict(zip(fields, args, strict=False)) | given
        record.check(name, values)
        for field in fields:
            setattr(self, field, values.get(field, defaults.get(field)))

    return type(name, (), {"__init__": initialise})


@cache
def recorded(package: str) -> Record:
    """The committed record of a package."""
    return msgspec.json.decode((FOLDER / f"{package}.json").read_bytes(), type=Record)


def installed(package: str) -> tuple[Path, str] | None:
    """The folder and version of the installed package, which is not imported; None if missing."""
    try:
        found = version(DISTRIBUTIONS[package])
    except PackageNotFoundError:
        return None
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]), found


def read_package(package: str, root: Path, release: str) -> Record:
    """Record the package whose sources are in `root`; raises LookupError for a missing name."""
    names = {name: _fields(root / path, name) for name, path in SOURCES[package].items()}
    payloads = _payloads(root / SGLANG["BlockStored"]) if package == "sglang" else {}
    return Record(package, release, "read from the package's sources", names, payloads)


def _fields(path: Path, name: str) -> list[str]:
    if path.is_dir():  # one class per namespace of arguments
        modules = sorted(path.glob("*.py"))
        found = (node for module in modules for node in _definitions(module) if _is_class(node))
        return sorted({field for node in found for field in _class_fields(node)})
    node = _find(path, name)
    return _class_fields(node) if isinstance(node, ast.ClassDef) else _parameters(node)


def _find(path: Path, name: str) -> Definition:
    nodes: list[Definition] = list(_definitions(path))
    for part in name.split("."):
        match = [node for node in nodes if node.name == part]
        if not match:
            raise LookupError(f"{path} does not define {name}")
        nodes = [n for n in match[-1].body if isinstance(n, Definition)]
    return match[-1]


@cache
def _definitions(path: Path) -> list[Definition]:
    tree = ast.parse(path.read_text())
    return [node for node in tree.body if isinstance(node, Definition)]


def _is_class(node: Definition) -> bool:
    return isinstance(node, ast.ClassDef)


def _class_fields(node: Definition) -> list[str]:
    """The annotated fields of a class, without private ones."""
    rows = [
        (item.target.id, item.value is not None)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    return [f"{name}{'?' * optional}" for name, optional in rows if not name.startswith("_")]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args][1:]  # without self
    first_optional = len(positional) - len(arguments.defaults)
    rows = [f"{a.arg}{'?' * (i >= first_optional)}" for i, a in enumerate(positional)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    only = [f"{a.arg}{'?' * (default is not None)}" for a, default in keywords]
    return [*rows, "*", *only] if only else rows


def _payloads(path: Path) -> dict[str, Any]:
    """One batch with an event of each kind, as the package's types encode it, decoded."""
    wanted = {*_EVENTS, *_EVENT_KINDS}
    body: list[ast.stmt] = [node for node in _definitions(path) if node.name in wanted]
    scope: dict[str, Any] = {"msgspec": msgspec, "enum": enum, "Any": Any}
    scope |= {"Optional": Optional, "Union": Union, "__name__": "recorded_events"}
    exec(compile(ast.Module(body, []), str(path), "exec"), scope)
    media = scope["StorageMedium"]
    stored = scope["BlockStored"](
        block_hashes=[-2, 5],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=None,
        medium=media.GPU,
        cache_salt="tag-kvm00000000000000ab",
        session_id="s",
    )
    removed = scope["BlockRemoved"](block_hashes=[5], medium=media.CPU)
    batch = scope["EventBatch"](ts=1.5, events=[stored, removed, scope["AllBlocksCleared"]()])
    packed = msgspec.msgpack.encode(batch)
    media_values = {medium.name: medium.value for medium in media}
    return {"batch": msgspec.msgpack.decode(packed), "media": media_values}


def differences(record: Record, other: Record) -> Iterator[str]:
    """Names and payloads of `record` that `other` lacks, or has in another form."""
    for name, fields in record.names.items():
        theirs = other.names.get(name, [])
        if missing := [field for field in fields if field not in theirs]:
            yield f"{name} lacks {', '.join(missing)}"
    if record.payloads != other.payloads:
        yield f"payloads are {other.payloads}"


def main() -> None:
    package, *rest = sys.argv[1:]
    if rest:
        root, release = Path(rest[0]), rest[1]
    else:
        found = installed(package)
        if found is None:
            sys.exit(f"{package} is not installed")
        root, release = found
    data = msgspec.to_builtins(read_package(package, root, release))
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
