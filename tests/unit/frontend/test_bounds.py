"""What one request may cost: refused before it is tokenized, cut into slices, bounded in values."""

import json
import re
import tracemalloc
from array import array
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stamp import STAMP
from tokenizers import Tokenizer, pre_tokenizers

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.conversation import CacheControl, Message, Text
from kvmesh.frontend.dialects.templates.prompt_json import MANY, dumps
from kvmesh.frontend.errors import ApiError, ContextExceeded, InvalidRequest
from kvmesh.frontend.json_bounds import MAX_VALUES, check_arguments
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess import preprocessor as prepare
from kvmesh.frontend.preprocess.preprocessor import ANSWER_BYTES, Preprocessor
from kvmesh.frontend.preprocess.prompt_spans import locate_spans
from kvmesh.frontend.tokenizer import text_slices as slices
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.text_slices import RUN, SLICE, any_of, composed_apart, cut, find_all

CONTEXT = 2048
TEXT = 'The "fox" said: jump(over, 12 dogs);\nNext line [a] = {b: c}\n\n  naïve <x>'


@cache
def dialect() -> Dialect:
    files = {file.name: file.read_bytes() for file in model_dir().iterdir() if file.is_file()}
    return Dialect(card(CONTEXT), files)


def served(context: int = CONTEXT) -> ServedModel:
    return ServedModel(card(context), dialect(), 0)


def card(context: int) -> ModelCard:
    return ModelCard(name="m", context=context, block_size=16, files="demo")


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return Chat().parse(msgspec.json.encode(body), {}, STAMP).request


def prompt(text: str) -> Any:
    return Tokenize().parse(msgspec.json.encode({"model": "m", "prompt": text}), {}, STAMP)


def preparer() -> Preprocessor:
    return Preprocessor(1 << 20, TenantNamespaces())


async def prepared(request: Any, context: int = CONTEXT) -> Any:
    return await preparer().prepare(request, served(context), None)


# --- before and while tokenizing ---


async def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Iterator[bytes]:
        raise AssertionError("tokenized")

    for name in ("steps", "text_steps"):
        monkeypatch.setattr(dialect().encoder, name, never)
    longest = dialect().encoder.longest_token
    assert longest is not None
    text = "word " * (CONTEXT * longest // 5 + 2)
    for request in (prompt(text), chat(messages=[{"role": "user", "content": text}])):
        with pytest.raises(ContextExceeded):
            await preparer().count(request, served())


async def test_tokenizing_ends_where_the_context_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    steps = dialect().encoder.text_steps

    def counted(text: str) -> Iterator[bytes]:
        for tokens in steps(text):
            told.append(len(tokens) // 4)
            yield tokens

    monkeypatch.setattr(dialect().encoder, "text_steps", counted)
    monkeypatch.setattr(type(dialect().encoder), "longest_token", None)
    with pytest.raises(ContextExceeded) as error:
        await preparer().count(prompt("one two three " * 300_000), served())
    assert CONTEXT < error.value.prompt_tokens == sum(told) < 20 * CONTEXT


async def test_a_prompt_of_many_special_tokens_is_not_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(dialect().encoder), "longest_token", None)
    text = "<|im_end|>" * (CONTEXT + 1)
    with pytest.raises(ContextExceeded):
        await preparer().count(chat(messages=[{"role": "user", "content": text}]), served())


@pytest.mark.parametrize("char", ["a", " ", "é", "日", "<"])
async def test_an_endless_word_is_refused(char: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await preparer().count(prompt(char * (2 * RUN + 1)), served(1 << 20))
    assert error.value.code == "run_too_long"


async def test_long_texts_have_the_library_s_tokens() -> None:
    text = (TEXT * 3000)[: 3 * SLICE]
    ids = dialect().tokenizer.encode(text).ids
    assert await preparer().count(prompt(text), served(1 << 20)) == [array("I", ids).tobytes()]
    word = "ab" * 10_000
    ids = dialect().tokenizer.encode(word).ids
    assert await preparer().count(prompt(word), served(1 << 20)) == [array("I", ids).tobytes()]


def test_many_tokens_are_written_as_few() -> None:
    wanted = list(range(3 * 2**14 + 5))
    for ids in (wanted, wanted[:1]):
        answer = Tokenize().answer([array("I", ids).tobytes()], CONTEXT)
        told = msgspec.json.decode(answer)
        assert told == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}


def test_a_text_for_the_library_is_cut_only_between_words() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    text = "𐌰𐌱 " + TEXT * 3000
    encoder = TextEncoder(tokenizer)
    steps = list(encoder.steps(text))
    assert len(steps) > 2
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(steps) == array("I", ids).tobytes()


def test_a_tokenizer_whose_words_are_others_is_not_cut() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    steps = list(TextEncoder(tokenizer).steps(TEXT * 3000))
    assert len(steps) == 1


# --- slices ---


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<a", "b>", "<", "x" * 50]), max_size=60))
def test_markers_are_found_as_in_one_piece(parts: list[str]) -> None:
    markers = ["<a>", "<ab>", "<a"]
    text = "".join(parts)
    longest_first = "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True))
    wanted = [(m.start(), m[0]) for m in re.finditer(longest_first, text)]
    pattern = re.compile(any_of(markers))
    before, slices.SLICE = slices.SLICE, 40
    try:
        found = [(m.start(), m[0]) for m in find_all(pattern, text, 4)]
    finally:
        slices.SLICE = before
    assert found == wanted


@given(st.text(alphabet='ab 1"(,\né日\u0301', max_size=200))
def test_slices_are_the_text(text: str) -> None:
    assert "".join(cut(text, 5)) == text
    assert "".join(composed_apart(text)) == text


# --- bodies ---


async def test_arguments_of_calls_are_json_and_bounded() -> None:
    text = '{"a": [' + "1," * (MAX_VALUES // 2) + "1]}"
    call = {"id": "a", "function": {"name": "f", "arguments": text}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    check_arguments(chat(messages=asked).messages)
    request = chat(messages=[*asked, asked[1]])
    request.body_bytes = 3 * MAX_VALUES
    with pytest.raises(ApiError) as error:
        await preparer().count(request, served(1 << 22))
    assert error.value.kind == "too_large"


def test_long_json_is_written_in_steps_and_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"é": [[n, {"a": None}] for n in range(MANY)], "b": 'x"'}
    wanted = json.dumps(value, ensure_ascii=False)

    def never(*_: object, **__: object) -> str:
        raise AssertionError("in one call")

    monkeypatch.setattr(json, "dumps", never)
    assert dumps(value) == wanted
    assert dumps(value, separators=(",", ":")) == wanted.replace(", ", ",").replace(": ", ":")
    with pytest.raises(AssertionError):
        dumps([1])


async def test_the_prompts_of_all_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PROMPT_BYTES", 4 * 500)
    text = "one two three " * 30
    assert (await prepared(chat(messages=[{"role": "user", "content": text}], n=2))).prompts
    with pytest.raises(InvalidRequest) as error:
        await prepared(chat(messages=[{"role": "user", "content": text}], n=64))
    assert error.value.param == "n"


async def test_answers_are_bounded_by_their_memory() -> None:
    many = {"n": 128, "logprobs": True, "top_logprobs": 20}
    with pytest.raises(InvalidRequest) as error:
        await prepared(chat(max_tokens=16_000, **many), 1 << 17)
    assert error.value.param == "max_tokens"
    made = await prepared(chat(**many), 1 << 17)
    assert 0 < made.max_tokens * 128 * 21 * 400 <= ANSWER_BYTES
    assert (await prepared(chat(), 1 << 17)).max_tokens > 100_000


# --- finding where marked texts stand ---


async def test_marks_within_a_long_text_hold_no_copies_of_it() -> None:
    words, mark = "word " * 50_000, CacheControl(300.0)
    marked = [Text(f"y{n} z", cache=mark) for n in range(1000)]
    request = chat()
    request.messages = [Message("user", [Text(words), *marked])]
    tracemalloc.start()
    try:
        await prepared(request, 1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(words)


class Counted(str):
    """A prompt that counts the characters which were looked at."""

    looked = 0

    def find(self, part: str, start: Any = 0, end: Any = None) -> int:
        place = super().find(part, start, end)
        self.looked += (end if place < 0 else place) - start
        return place

    def rfind(self, part: str, start: Any = 0, end: Any = None) -> int:
        place = super().rfind(part, start, end)
        self.looked += end - (start if place < 0 else place)
        return place


@pytest.mark.parametrize("hidden", ["short", "a long text that is nowhere " * 100_000])
def test_texts_that_are_hidden_cost_a_few_looks(hidden: str) -> None:
    text = Counted("a " * 1_000_000)
    marked = [Text(f"{hidden}{n}", cache=CacheControl(300.0)) for n in range(200)]
    request = chat()
    request.messages = [Message("user", [block]) for block in marked]
    locate_spans(request, text, [0, len(text)], drops_thinking=False)
    assert text.looked < 10 * len(text)
