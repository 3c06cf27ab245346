"""The tokenizer of a model folder, also of one for tiktoken or sentencepiece instead of a file.

Kimi models are published with `tiktoken.model` and Python code that reads it. Their pattern and the
number of their special tokens are constants of that code. Others have a `tokenizer.model` of
sentencepiece.
"""

import base64
import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.storage.sentencepiece_model import (
    BPE,
    PieceType,
    SentencepieceModel,
    read_sentencepiece,
    tokenizer_of,
)

TOKENIZER = "tokenizer.json"
RANKS = "tiktoken.model"
PIECES = "tokenizer.model"
ADDED = "added_tokens.json"
CONVERT = (
    "transformers converts others: python -c 'import sys, transformers as t;"
    " t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' FOLDER"
)
_CODE = "tokenization_kimi"  # the module in which Kimi's code has its tokenizer
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
    return bool(tokenizer_files(folder))


def tokenizer_files(folder: Path) -> tuple[str, ...]:
    """The files of a folder that `tokenizer_json` reads besides settings; empty without any."""
    if (folder / TOKENIZER).is_file():
        return (TOKENIZER,)
    if _has_ranks(folder):
        return (RANKS,)
    return (PIECES, ADDED) if (folder / PIECES).is_file() else ()


def why_no_tokenizer(folder: Path) -> str:
    """The reason why a folder has no tokenizer, with the remedy."""
    if not (folder / "config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return f"{folder} is not a Hugging Face model folder: it has no {TOKENIZER}"
    return (
        f"{folder} has no {TOKENIZER}, no {PIECES} of sentencepiece, and no {RANKS} with"
        f" {_CODE}.py; {CONVERT}"
    )


def tokenizer_json(folder: Path) -> bytes:
    """The tokenizer of a model folder as `tokenizer.json`; raises ModelFilesError without one.

    Takes seconds for ranks.
    """
    files = tokenizer_files(folder)
    if not files:
        raise ModelFilesError(why_no_tokenizer(folder))
    content = (folder / files[0]).read_bytes()
    try:
        if files[0] == RANKS:
            return _of_ranks(content, json.dumps(_config(folder)))
        if files[0] == PIECES:
            added = _object(folder / ADDED)
            return _of_pieces(content, json.dumps(_config(folder)), json.dumps(added))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{folder} has a {files[0]} that cannot be read: {error}"
        raise ModelFilesError(f"{reason}; {CONVERT}") from error
    return content


def _has_ranks(folder: Path) -> bool:
    named = (_config(folder).get("auto_map") or {}).get("AutoTokenizer") or ""
    known = f"{_CODE}." in str(named) or (folder / f"{_CODE}.py").is_file()
    return known and (folder / RANKS).is_file()


def _config(folder: Path) -> dict[str, Any]:
    return _object(folder / "special_tokens_map.json") | _object(folder / "tokenizer_config.json")


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1)
def _of_pieces(content: bytes, config_text: str, added_text: str) -> bytes:
    """The tokenizer of a sentencepiece model, with the tokens and settings of the folder."""
    config, model = json.loads(config_text), read_sentencepiece(content)
    special = {_text(value) for key, value in config.items() if key.endswith("_token")}
    named = {
        number: {"content": text, "special": text in special}
        for text, number in json.loads(added_text).items()
    }
    decoder = config.get("added_tokens_decoder") or {}
    named |= {int(number): token for number, token in decoder.items()}
    pieces = [
        piece._replace(text=named[number]["content"]) if number in named else piece
        for number, piece in enumerate(model.pieces)
    ]
    model = model._replace(pieces=pieces)
    ends = {"bos": (model.bos, model.type == BPE), "eos": (model.eos, False)}
    first, last = (
        (_text(config.get(f"{end}_token")) or model.text(number) or "")
        if config.get(f"add_{end}_token", default)
        else ""
        for end, (number, default) in ends.items()
    )
    prefix = config.get("add_prefix_space")
    converted = tokenizer_of(
        model,
        prefix=model.dummy_prefix if prefix is None else bool(prefix),
        prefixes_all=bool(config.get("legacy")),
        first=first,
        last=last,
    )
    converted["added_tokens"] = _tokens_beside(model, named)
    return json.dumps(converted, ensure_ascii=False).encode()


def _tokens_beside(
    model: SentencepieceModel, named: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The control tokens of a model and the added ones; ids between these get reserved ones."""
    control = (PieceType.CONTROL, PieceType.UNKNOWN)
    own = {n: {"content": p.text} for n, p in enumerate(model.pieces) if p.type in control}
    count = max([len(model.pieces) - 1, *named]) + 1
    beyond = {n: {"content": f"<|reserved_token_{n}|>"} for n in range(len(model.pieces), count)}
    return [_token(n, found) for n, found in sorted((beyond | own | named).items())]


def _token(number: int, found: dict[str, Any]) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {
        "id": number,
        "content": found["content"],
        "special": bool(found.get("special", True)),
    } | {flag: bool(found.get(flag, False)) for flag in flags}


def _text(token: Any) -> str:
    """The text of a token in a configuration: a string, or an object with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


@lru_cache(maxsize=1)
def _of_ranks(model: bytes, config: str) -> bytes:
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
    decoder = config.get("added_tokens_decoder") or {}
    named = {int(number): token for number, token in decoder.items()}
    reserved = {
        number: {"content": f"<|reserved_token_{number}|>"}
        for number in range(first, first + _SPECIAL_TOKENS)
    }
    return [_token(number, named.get(number, found)) for number, found in reserved.items()]


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
