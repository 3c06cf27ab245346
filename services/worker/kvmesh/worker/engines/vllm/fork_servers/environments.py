"""Environment variables that decide what an import does: a fork must have those of its server."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import TypeVar

Value = TypeVar("Value", str, str | None)
PREFIXES = (
    *("GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TCMALLOC_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_"),
)
CHANGING = ("_PORT", "_ADDRESS", "_IP")  # read when used, and different in each start
LINKER_PATH = "LD_LIBRARY_PATH"  # read before any import; OpenCV's import extends it each time


def decisive(environment: Mapping[str, Value]) -> dict[str, Value]:
    """Those variables that imports may read."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(PREFIXES) and not name.endswith(CHANGING) and name != LINKER_PATH
    }


def fingerprint(environment: Mapping[str, str]) -> str:
    """A name for the decisive part of an environment."""
    return sha256(json.dumps(decisive(environment)).encode()).hexdigest()[:16]


def difference(environment: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str | None]:
    """Changes of `base` for the decisive part of `environment`; None removes a variable."""
    wanted, had = decisive(environment), decisive(base)
    changed: dict[str, str | None] = {k: v for k, v in wanted.items() if had.get(k) != v}
    return changed | dict.fromkeys(had.keys() - wanted.keys())


def changed(base: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """`base` with the changes that `difference` found."""
    merged = {**base, **changes}
    return {name: value for name, value in merged.items() if value is not None}
