"""Kimi's ranks for tiktoken become a tokenizer file that gives the same tokens."""

import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split

from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.storage.model_files import pack, unpack
from kvmesh.bus.storage.tokenizer_file import PATTERN, has_tokenizer, tokenizer_json

CODE = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
TEXT = (
    "function returns the 世界 日本 values; it's naïve, IT'S 12345678 한국어"
    "\n\n\tdef f(x):\n  x += 1"
)
SPLIT = Split(Regex(PATTERN), "isolated")


def trained() -> dict[bytes, int]:
    """Ranks of tokens, made from frequent pairs as they are found, in order."""
    chance, ranks = random.Random(1), {bytes([byte]): byte for byte in range(256)}
    words = [word.encode() for word, _ in SPLIT.pre_tokenize_str(TEXT)]
    for _ in range(300):
        parts = merged(chance.choice(words), ranks)
        if len(parts) > 1:
            at = chance.randrange(len(parts) - 1)
            ranks.setdefault(parts[at] + parts[at + 1], len(ranks))
    return ranks


def merged(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The tokens of a word as tiktoken makes them: the leftmost of the lowest rank first."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while word not in ranks and len(parts) > 1:
        found = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = found.index(min(found))
        if found[at] == len(ranks):
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts if word not in ranks else [word]


def folder(path: Path, ranks: dict[bytes, int], auto_map: Any = CODE) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (path / "tiktoken.model").write_text("".join(lines))
    named = {len(ranks): ("[BOS]", True), len(ranks) + 3: ("<|tool_call_begin|>", False)}
    added = {str(i): {"content": text, "special": kind} for i, (text, kind) in named.items()}
    config = {"auto_map": auto_map, "added_tokens_decoder": added}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_tokens_are_those_of_the_ranks(tmp_path: Path) -> None:
    ranks, chance = trained(), random.Random(2)
    found = folder(tmp_path, ranks)
    assert has_tokenizer(found)
    tokenizer = Tokenizer.from_buffer(unpack(pack(found))["tokenizer.json"])
    for _ in range(300):
        text = "".join(chance.choices(TEXT, k=chance.randint(1, 40)))
        words = [word.encode() for word, _ in SPLIT.pre_tokenize_str(text)]
        ids = [ranks[token] for word in words for token in merged(word, ranks)]
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_ids_behind_the_ranks(tmp_path: Path) -> None:
    ranks = trained()
    tokenizer, first = Tokenizer.from_buffer(tokenizer_json(folder(tmp_path, ranks))), len(ranks)
    text = f"[BOS]a<|tool_call_begin|>b<|reserved_token_{first + 255}|>"
    ids = [first, ranks[b"a"], first + 3, ranks[b"b"], first + 255]
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.get_vocab_size() == first + 256
    assert tokenizer.decode(ids) == "a<|tool_call_begin|>b"


def test_words_are_those_of_the_model_code() -> None:
    text = "Hello 世界It's ÉTÉ한국 12345  x\n\n  y"
    words = [
        "Hello",
        " ",
        "世界",
        "It's",
        " ÉTÉ한국",
        " ",
        "123",
        "45",
        " ",
        " x",
        "\n\n",
        " ",
        " y",
    ]
    assert [word for word, _ in SPLIT.pre_tokenize_str(text)] == words


def test_ranks_of_other_models_are_refused(tmp_path: Path) -> None:
    found = folder(tmp_path, trained(), {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer"]})
    assert not has_tokenizer(found)
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        tokenizer_json(found)


@pytest.mark.parametrize("damaged", ["x", "YQ== one", "!! 1"])
def test_damaged_ranks_are_named(tmp_path: Path, damaged: str) -> None:
    found = folder(tmp_path, trained())
    (found / "tiktoken.model").write_text(damaged)
    with pytest.raises(ModelFilesError, match=r"tiktoken\.model that cannot be read"):
        tokenizer_json(found)


def test_a_tokenizer_file_comes_first(tmp_path: Path) -> None:
    found = folder(tmp_path, trained())
    (found / "tokenizer.json").write_text("{}")
    assert tokenizer_json(found) == b"{}"
