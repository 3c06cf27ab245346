"""A sentencepiece model becomes a tokenizer file that gives the same tokens as its library."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvmesh.bus.errors import ModelFilesError
from kvmesh.bus.storage.model_files import pack, unpack
from kvmesh.bus.storage.tokenizer_file import has_tokenizer, tokenizer_json
from kvmesh.demo.corpus import corpus

sentencepiece = pytest.importorskip("sentencepiece")
EXACT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA = {"model_type": "bpe", "byte_fallback": True, **EXACT}
MARKS = ["▁▁", "▁▁▁", "\n\n", "<start_of_turn>"]
GEMMA = {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": MARKS, "split_digits": True}
KINDS = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "normalising BPE": {"model_type": "bpe", "byte_fallback": True},
    "BPE without bytes": {"model_type": "bpe", **EXACT},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
}
ODD = [
    "",
    " ",
    "  ",
    " a",
    "  two",
    "b ",
    "\n\nx\n",
    "\t",
    "naïve 世界 🎉\u00a0x",
    "▁",
    " ▁ a",
    "ﬁ Ⅳ",
]

TEXT = "\n".join(corpus(pieces=400))


def trained(kind: str, **more: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=700,
        minloglevel=2,
        num_threads=1,
        **KINDS[kind],
        **more,
    )
    return model.getvalue()


def folder(path: Path, model: bytes, **config: Any) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def texts() -> list[str]:
    chance = random.Random(3)
    parts = [TEXT[at : at + chance.randint(1, 120)] for at in chance.sample(range(len(TEXT)), 300)]
    mixed = [
        "".join(chance.choices(" ab▁\nthe\té世.", k=chance.randint(0, 30))) for _ in range(200)
    ]
    return ODD + parts + mixed


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_library(tmp_path: Path, kind: str, legacy: bool) -> None:
    model = trained(kind)
    found = folder(tmp_path, model, legacy=legacy)
    assert has_tokenizer(found)
    tokenizer = Tokenizer.from_buffer(unpack(pack(found))["tokenizer.json"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text), text
        if kind in ("llama", "gemma"):
            assert tokenizer.decode(ids) == reference.decode(ids)


def test_tokens_of_the_folder_and_its_first_token(tmp_path: Path) -> None:
    found = folder(
        tmp_path,
        trained("llama", control_symbols=["[INST]"]),
        bos_token="<s>",
        eos_token={"content": "</s>"},
        added_tokens_decoder={"705": {"content": "<|im_end|>", "special": True}},
    )
    (found / "added_tokens.json").write_text('{"<tool>": 700}')
    tokenizer = Tokenizer.from_buffer(tokenizer_json(found))
    encoded = tokenizer.encode("[INST]<tool><|im_end|>")
    assert (encoded.ids, encoded.tokens[1]) == ([1, 3, 700, 705], "[INST]")
    assert tokenizer.decode(encoded.ids) == "<tool>"
    assert tokenizer.get_vocab_size() == 706


@pytest.mark.parametrize(
    ("config", "ids"),
    [({"add_bos_token": False}, []), ({"add_eos_token": True}, [1, 2]), ({}, [1])],
)
def test_first_and_last_tokens_follow_the_configuration(
    tmp_path: Path, config: dict[str, bool], ids: list[int]
) -> None:
    found = folder(tmp_path, trained("llama"), **config)
    assert Tokenizer.from_buffer(tokenizer_json(found)).encode("").ids == ids


def test_a_part_after_a_special_token_has_a_space_only_in_legacy(tmp_path: Path) -> None:
    model, tokens = trained("llama"), {}
    for legacy in (False, True):
        found = folder(tmp_path, model, legacy=legacy, add_bos_token=False)
        tokenizer = Tokenizer.from_buffer(tokenizer_json(found))
        tokens[legacy] = "".join(tokenizer.encode("a</s>b").tokens)
    assert tokens == {False: "▁a</s>b", True: "▁a</s>▁b"}


@pytest.mark.parametrize("damaged", [b"", b"x", b"\x0a\xff", b"YQ== 0\nYg== 1\n", bytes(64)])
def test_a_damaged_model_is_named_with_the_remedy(tmp_path: Path, damaged: bytes) -> None:
    with pytest.raises(
        ModelFilesError, match=r"tokenizer\.model that cannot be read.*transformers"
    ):
        tokenizer_json(folder(tmp_path, damaged))


def test_a_truncated_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.model that cannot be read"):
        tokenizer_json(folder(tmp_path, trained("llama")[:-3]))
