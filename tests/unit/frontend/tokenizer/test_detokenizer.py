"""Detokenizers lose no text and split no character."""

import json
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvmesh.demo import model_dir
from kvmesh.frontend.tokenizer.detokenizer import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    DetokenizerFactory,
    StreamDetokenizer,
    is_byte_level,
)

DEMO_FILE = (model_dir() / "tokenizer.json").read_bytes()
DEMO = Tokenizer.from_buffer(DEMO_FILE)
HIDDEN = frozenset(i for i, t in DEMO.get_added_tokens_decoder().items() if t.special)
TABLE = ByteTable(DEMO, HIDDEN)
TEXTS = ["plain text", "naïve café — 日本語", "🦀🧩 emoji 👩‍👩‍👧‍👦", "tabs\tand\nlines  ", "a" * 50]

Make = Callable[[], Detokenizer]


@pytest.fixture(params=["bytes", "stream"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "bytes":
        return lambda: ByteDetokenizer(TABLE)
    return lambda: StreamDetokenizer(DEMO, HIDDEN)


def run(detokenizer: Detokenizer, ids: list[int], size: int) -> str:
    parts = [detokenizer.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    return "".join(parts) + detokenizer.finish()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_text_is_restored_for_any_chunk_size(make: Make, text: str, size: int) -> None:
    assert run(make(), DEMO.encode(text, add_special_tokens=False).ids, size) == text


def test_a_character_waits_for_its_last_byte(make: Make) -> None:
    ids = DEMO.encode("🧿", add_special_tokens=False).ids
    assert len(ids) > 1
    detokenizer = make()
    assert [detokenizer.feed([i]) for i in ids] == [""] * (len(ids) - 1) + ["🧿"]
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_replaced(make: Make) -> None:
    ids = DEMO.encode("ok 🧿", add_special_tokens=False).ids
    detokenizer = make()
    shown = "".join(detokenizer.feed([i]) for i in ids[:-1])
    assert shown == "ok "
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_hidden_tokens_have_no_text(make: Make) -> None:
    assert HIDDEN
    ids = DEMO.encode("seen", add_special_tokens=False).ids
    assert run(make(), [min(HIDDEN), *ids, max(HIDDEN)], 1) == "seen"


def test_an_id_outside_the_vocabulary_is_ignored() -> None:
    ids = DEMO.encode("seen", add_special_tokens=False).ids
    assert run(ByteDetokenizer(TABLE), [*ids, 10**6], 100) == "seen"


def test_only_a_pure_byte_level_decoder_gets_the_table() -> None:
    assert is_byte_level(DEMO_FILE)
    other = json.loads(DEMO_FILE)
    other["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    assert not is_byte_level(json.dumps(other).encode())
    other["decoder"] = None
    assert not is_byte_level(json.dumps(other).encode())


def test_a_word_level_tokenizer_streams_with_its_own_decoder() -> None:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator(["hello world here we are"], trainer)
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    ids = tokenizer.encode("hello world").ids
    end = tokenizer.token_to_id("<end>")
    assert end is not None
    assert run(StreamDetokenizer(tokenizer, frozenset({end})), [*ids, end], 1) == "hello world"


@pytest.mark.parametrize("text", TEXTS)
def test_all_tokens_are_decoded_hidden_ones_included(text: str) -> None:
    factory = DetokenizerFactory(DEMO, DEMO_FILE, HIDDEN)
    ids = DEMO.encode(text, add_special_tokens=False).ids
    end = DEMO.token_to_id("<|im_end|>")
    assert end is not None
    assert factory.decode(ids) == text
    assert factory.decode([*ids, end, *ids]) == f"{text}<|im_end|>{text}"
