"""Limits of prompts and outputs, checked before and during tokenization."""

import tracemalloc
from array import array
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from support.stamp import STAMP
from unit.frontend.apis.prompts import conversation, request_of

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.conversation import CacheControl, Message, Text
from kvmesh.frontend.errors import ContextExceeded, InvalidRequest
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess import limits
from kvmesh.frontend.preprocess.limits import MAX_OUTPUT_BYTES, check_tokens, counted_tokens
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.tokenizer.text_slices import MAX_RUN, SLICE
from kvmesh.hashing import FIRST_IMAGE_TOKEN

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
    return Tokenize().parse(msgspec.json.encode({"model": "m", "prompt": text}), {}, STAMP).request


def make_preprocessor() -> Preprocessor:
    return Preprocessor(1 << 20, TenantNamespaces())


async def prepared(request: Any, context: int = CONTEXT) -> Any:
    return await make_preprocessor().prepare(request, served(context), None)


async def test_a_text_too_long_for_the_context_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> Iterator[bytes]:
        raise AssertionError("tokenized")

    for name in ("steps", "text_steps"):
        monkeypatch.setattr(dialect().encoder, name, never)
    longest = dialect().encoder.longest_token
    assert longest is not None
    text = "word " * (counted_tokens(CONTEXT) * longest // 5 + 2)
    for request in (prompt(text), chat(messages=[{"role": "user", "content": text}])):
        with pytest.raises(ContextExceeded) as error:
            await make_preprocessor().count(request, served())
        assert error.value.at_least


async def test_tokenizing_stops_where_nobody_counts_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MIN_COUNTED", 0)
    counts: list[int] = []
    steps = dialect().encoder.text_steps

    def counted(text: str) -> Iterator[bytes]:
        for tokens in steps(text):
            counts.append(len(tokens) // 4)
            yield tokens

    monkeypatch.setattr(dialect().encoder, "text_steps", counted)
    monkeypatch.setattr(type(dialect().encoder), "longest_token", None)
    with pytest.raises(ContextExceeded) as error:
        await make_preprocessor().count(prompt("one two three " * 300_000), served())
    assert counted_tokens(CONTEXT) < error.value.prompt_tokens == sum(counts) < 20 * CONTEXT
    assert error.value.at_least


@pytest.mark.parametrize("text", ["one two three " * CONTEXT, "<|im_end|>" * (CONTEXT + 1)])
async def test_a_prompt_beyond_the_context_is_counted(text: str) -> None:
    """Clients learn how much to cut, and nothing of it is kept."""
    for made in (prompt(text), chat(messages=[{"role": "user", "content": text}])):
        preprocessor = make_preprocessor()
        (tokens,) = await preprocessor.count(made, served())
        for _ in range(2):
            with pytest.raises(ContextExceeded) as error:
                await preprocessor.prepare(made, served(), None)
            assert error.value.prompt_tokens == len(tokens) // 4 > CONTEXT
            assert not error.value.at_least


async def test_a_prompt_of_too_many_special_tokens_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(dialect().encoder), "longest_token", None)
    monkeypatch.setattr(limits, "MIN_COUNTED", 0)
    text = "<|im_end|>" * (counted_tokens(CONTEXT) + 1)
    with pytest.raises(ContextExceeded):
        await make_preprocessor().count(
            chat(messages=[{"role": "user", "content": text}]), served()
        )


@pytest.mark.parametrize("char", ["a", " ", "é", "日", "<"])
async def test_a_huge_word_is_rejected(char: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await make_preprocessor().count(prompt(char * (2 * MAX_RUN + 1)), served(1 << 20))
    assert error.value.code == "run_too_long"


async def test_long_texts_have_the_tokens_of_the_library() -> None:
    text = (TEXT * 3000)[: 3 * SLICE]
    ids = dialect().tokenizer.encode(text).ids
    assert await make_preprocessor().count(prompt(text), served(1 << 20)) == [
        array("I", ids).tobytes()
    ]
    word = "ab" * 10_000
    ids = dialect().tokenizer.encode(word).ids
    assert await make_preprocessor().count(prompt(word), served(1 << 20)) == [
        array("I", ids).tobytes()
    ]


async def test_half_a_character_in_the_arguments_of_a_call_is_replaced() -> None:
    function = {"name": "f", "arguments": '{"a": "x\\ud83d"}'}
    call = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function"} | {"function": function}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    encoded = (
        await prepared(chat(messages=[{"role": "user", "content": "Hi"}, call, result]))
    ).encoded
    assert '"x\ufffd"' in encoded.text


async def test_the_prompts_of_all_choices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_BYTES", 4 * 500)
    text = "one two three " * 30
    assert (await prepared(chat(messages=[{"role": "user", "content": text}], n=2))).prompts
    with pytest.raises(InvalidRequest) as error:
        await prepared(chat(messages=[{"role": "user", "content": text}], n=64))
    assert error.value.param == "n"


async def test_the_output_of_all_choices_is_bounded_by_its_memory() -> None:
    many = {"n": 128, "logprobs": True, "top_logprobs": 20}
    with pytest.raises(InvalidRequest) as error:
        await prepared(chat(max_tokens=16_000, **many), 1 << 17)
    assert error.value.param == "max_tokens"
    unlimited = await prepared(chat(**many), 1 << 17)
    assert 0 < unlimited.max_tokens * 128 * 21 * 400 <= MAX_OUTPUT_BYTES
    assert (await prepared(chat(), 1 << 17)).max_tokens > 100_000


async def test_marks_inside_a_long_text_do_not_copy_it() -> None:
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


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("token", [-1, FIRST_IMAGE_TOKEN, 1 << 32])
async def test_ids_that_no_vocabulary_has_are_refused(api: str, token: int) -> None:
    """The larger ones would name the content of images."""
    ids = [1, token, 2]
    sent: dict[str, Any] = {"prompt": ids}
    if api == "chat":
        sent = conversation("chat", {"role": "user", "content": "x"})
        sent["nvext"] = {"token_data": ids}
    with pytest.raises(InvalidRequest):
        await prepared(request_of(api, sent))


@pytest.mark.parametrize(
    ("ids", "vocabulary"), [([-1], 8), ([8], 8), ([1 << 31], 1 << 40), ([1 << 32], 1 << 40)]
)
def test_no_vocabulary_has_the_ids_that_name_images(ids: list[int], vocabulary: int) -> None:
    """A model's files state its size, and may state any."""
    check_tokens([0, 7], vocabulary, "prompt")
    with pytest.raises(InvalidRequest, match=f"`prompt`: token {ids[0]} is not in"):
        check_tokens([7, *ids], vocabulary, "prompt")
