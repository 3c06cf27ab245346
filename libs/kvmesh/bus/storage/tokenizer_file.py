"""The tokenizer of a model folder, also of one with ranks for tiktoken instead of a file.

Kimi models are published with `tiktoken.model` and Python code that reads it. Their pattern and the
number of their special tokens are constants of that code.
"""

import base64
import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvmesh.bus.errors import ModelFilesError

TOKENIZER = "tokenizer.json"
RANKS = "tiktoken.model"
_CODE = "tokenization_kimi."  # in which Kimi's configuration names its tokenizer
_SPECIAL_TOKENS = 256
_UPPER, _LOWER = (
    rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def has_tokenizer(folder: Path) -> bool:
    """True if `tokenizer_json` finds a tokenizer in the folder."""
    return (folder / TOKENIZER).is_file() or _has_ranks(folder)


def tokenizer_json(folder: Path) -> bytes:
    """The tokenizer of a model folder as `tokenizer.json`; raises ModelFilesError without one.

    Takes seconds for ranks.
    """
    if (folder / TOKENIZER).is_file():
        return (folder / TOKENIZER).read_bytes()
    if not _has_ranks(folder):
        raise ModelFilesError(f"{folder} has no {TOKENIZER}: not a Hugging Face model folder")
    try:
        return _converted((folder / RANKS).read_bytes(), json.dumps(_config(folder)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(f"{folder} has a {RANKS} that cannot be read: {error}") from error


def _has_ranks(folder: Path) -> bool:
    named = (_config(folder).get("auto_map") or {}).get("AutoTokenizer") or ""
    return _CODE in str(named) and (folder / RANKS).is_file()


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1)
def _converted(model: bytes, config: str) -> bytes:
    pairs = (line.split() for line in model.splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    letters = _letters()
    texts = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__)]
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    converted = {
        "version": "1.0",
        "added_tokens": _added(len(ranks), json.loads(config)),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"invert": False}, level | {"use_regex": False}],
        },
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {text: ranks[token] for token, text in texts.items()},
            "merges": [[texts[part] for part in parts] for parts in merges if len(parts) == 2],
        },
    }
    return json.dumps(converted, ensure_ascii=False).encode()


def _added(first: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The special tokens: those that the configuration names, and reserved ones."""
    named = {int(number): token for number, token in config["added_tokens_decoder"].items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {
            "id": number,
            "content": named.get(number, {}).get("content", f"<|reserved_token_{number}|>"),
            "special": bool(named.get(number, {}).get("special", True)),
        }
        | plain
        for number in range(first, first + _SPECIAL_TOKENS)
    ]


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts whose merge makes the token; itself if no tokens make it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = found.index(min(found))
        if found[at] == len(ranks):
            return [token]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _letters() -> list[str]:
    """The character of each byte in byte-level tokens: itself if it is visible, else another."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    shown = dict(zip(hidden, range(256, 512), strict=False))
    return [chr(shown.get(byte, byte)) for byte in range(256)]
