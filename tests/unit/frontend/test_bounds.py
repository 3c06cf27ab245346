"""What one request may cost: refused before it is tokenized, cut into slices, bounded in values."""

import asyncio
import json
import re
import threading
import tracemalloc
from array import array
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import AnswerSummary, Usage
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.responses.sealed_reasoning import seal
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.conversation import CacheControl, Message, Text
from kvmesh.frontend.dialects.templates.prompt_json import MANY, dumps
from kvmesh.frontend.errors import ApiError, ContextExceeded, InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads, Steps
from kvmesh.frontend.http import json_bounds as values
from kvmesh.frontend.http.bodies import LARGE, check_text
from kvmesh.frontend.http.json_bounds import DEAR, MAX_VALUES, check_arguments, check_values
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess import preprocessor as prepare
from kvmesh.frontend.preprocess.preprocessor import ANSWER_BYTES, Preprocessor
from kvmesh.frontend.preprocess.prompt_spans import locate_spans
from kvmesh.frontend.tokenizer import text_slices as slices
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.text_slices import RUN, SLICE, any_of, composed_apart, cut, find_all
from kvmesh.runtime.fair_slots import FairQueue

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
    return Chat().parse(msgspec.json.encode(body), {}).request


def prompt(text: str) -> Any:
    return Tokenize().parse(msgspec.json.encode({"model": "m", "prompt": text}), {})


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


@pytest.mark.parametrize("place", [0, LARGE - 1, LARGE, 2 * LARGE + 3])
async def test_a_large_body_must_be_text_wherever_it_is_cut(place: int) -> None:
    text = ("x" * place + "é🦀" * LARGE).encode()
    await check_text(text)
    for bad in (text[:place] + b"\xff" + text[place:], text[:-1]):
        with pytest.raises(InvalidRequest, match="not valid UTF-8"):
            await check_text(bad)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * MAX_VALUES + b"1]}",
        b'{"a":[' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"a":[' + b'"\\"",' * (MAX_VALUES + 1) + b"1]}",
    ],
)
def test_a_body_of_too_many_values_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        check_values(body)
    assert error.value.kind == "too_large"


@pytest.mark.parametrize("text", ['"', "\\", "\\\\", ',{":"', "a\\", '\\"'])
def test_only_what_stands_outside_of_texts_counts(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = msgspec.json.encode([text * 50, 1, {"a": text * 30}])
    counted = 2 + 4 * DEAR - DEAR  # commas, and three that are dear
    for size in (2, 3, 7, 64):
        monkeypatch.setattr(values, "SLICE", size)
        monkeypatch.setattr(values, "MAX_VALUES", counted)
        check_values(body)
        monkeypatch.setattr(values, "MAX_VALUES", counted - 1)
        with pytest.raises(ApiError):
            check_values(body)


async def test_arguments_of_calls_are_json_and_bounded() -> None:
    text = '{"a": [' + "1," * (MAX_VALUES // 2) + "1]}"
    call = {"id": "a", "function": {"name": "f", "arguments": text}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    check_arguments(chat(messages=asked).messages)
    request = chat(messages=[*asked, asked[1]])
    request.size = 3 * MAX_VALUES
    with pytest.raises(ApiError) as error:
        await preparer().count(request, served(1 << 22))
    assert error.value.kind == "too_large"


def test_code_in_arguments_is_text() -> None:
    text = msgspec.json.encode({"code": "f(a, {b: [c]}), " * (MAX_VALUES // 4)}).decode()
    call = {"id": "a", "function": {"name": "f", "arguments": text}}
    check_arguments(chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages)


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


def test_sealed_thinking_is_bounded_for_a_whole_request() -> None:
    item = {"type": "reasoning", "encrypted_content": seal("0" * (9 << 20))}
    assert len(item["encrypted_content"]) < 100_000
    user = {"type": "message", "role": "user", "content": "x"}
    call = Responses().parse(msgspec.json.encode({"model": "m", "input": [item, user]}), {})
    assert len(call.request.messages) == 2
    with pytest.raises(InvalidRequest) as error:
        Responses().parse(msgspec.json.encode({"model": "m", "input": [item, item]}), {})
    assert error.value.param == "input[1].encrypted_content"


async def test_the_prompts_of_all_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "PROMPT_BYTES", 4 * 500)
    text = "one two three " * 30
    assert (await prepared(chat(messages=[{"role": "user", "content": text}], n=2))).prompts
    with pytest.raises(InvalidRequest) as error:
        await prepared(chat(messages=[{"role": "user", "content": text}], n=64))
    assert error.value.param == "n"


def test_stop_strings_are_bounded_together() -> None:
    assert chat(stop=["a" * 64] * 64).sampling.stop
    with pytest.raises(InvalidRequest) as error:
        chat(stop=["a" * 65] * 64)
    assert error.value.param == "stop"


def test_texts_may_hold_what_they_like() -> None:
    text = msgspec.json.encode({"content": '{"a": [1, 2], "\\\\": ","}' * (MAX_VALUES // 4)})
    check_values(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(token): 1.0 for token in range(1025)}},
        {"stop_token_ids": list(range(1025))},
    ],
)
def test_lists_of_tokens_are_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(**fields)
    assert error.value.param in fields


async def test_answers_are_bounded_by_their_memory() -> None:
    many = {"n": 128, "logprobs": True, "top_logprobs": 20}
    with pytest.raises(InvalidRequest) as error:
        await prepared(chat(max_tokens=16_000, **many), 1 << 17)
    assert error.value.param == "max_tokens"
    made = await prepared(chat(**many), 1 << 17)
    assert 0 < made.max_tokens * 128 * 21 * 400 <= ANSWER_BYTES
    assert (await prepared(chat(), 1 << 17)).max_tokens > 100_000


# --- stored responses ---


def stored(**fields: Any) -> tuple[Any, Any]:
    """The parsed call, and what it would store."""
    body = msgspec.json.encode({"model": "m", **fields})
    call = Responses().parse(body, {})
    assert call.thread is not None
    usage = Usage(prompt=1, cached=0, stored=0, output=1)
    return call, call.thread.turn(call.renderer.whole(AnswerSummary(usage)))


def test_only_what_a_prompt_can_show_is_stored_of_input() -> None:
    shown = {"type": "message", "role": "user", "content": "Hi", "id": "msg_1"}
    padding = {"padding": "x" * 100_000}
    _, turn = stored(input=[{**shown, **padding}, {"type": "web_search_call", **padding}])
    assert [msgspec.json.decode(item) for item in turn.input] == [shown]


def test_a_response_that_is_not_stored_says_so() -> None:
    call, turn = stored(input="Hi")
    assert msgspec.json.decode(turn.response)["store"] is True
    call.thread.unstored()
    usage = Usage(prompt=1, cached=0, stored=0, output=1)
    assert msgspec.json.decode(call.renderer.whole(AnswerSummary(usage)))["store"] is False


# --- fair turns ---


def test_owners_have_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item[0], item)
    order = []
    while queue:
        order.append(queue.next())
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_long_job_lets_others_go_between_its_steps() -> None:
    threads, order = FairThreads(1), []

    def job(name: str, steps: int) -> Steps[str]:
        for _ in range(steps):
            order.append(name)
            yield
        return name

    jobs = [threads.finish("big", job(f"big{n}", 50), at_once=False) for n in range(3)]
    jobs.append(threads.finish("small", job("small", 1), at_once=False))
    assert await asyncio.gather(*jobs) == ["big0", "big1", "big2", "small"]
    assert order.index("small") < 8


async def test_whoever_leaves_gives_the_thread_back() -> None:
    threads, gate = FairThreads(1), threading.Event()
    first = asyncio.create_task(threads.call("a", gate.wait))
    waiting = [asyncio.create_task(threads.call("b", lambda: True)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.cancel()
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert await threads.call("c", lambda: 7) == 7


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
