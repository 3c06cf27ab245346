"""What one request may cost: refused before it is tokenized, cut into slices, bounded in values."""

import asyncio
import threading
from array import array
from functools import cache
from typing import Any

import msgspec
import pytest

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import AnswerSummary, Usage
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.responses.sealed_reasoning import seal
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads, Steps
from kvmesh.frontend.http import json_bounds as values
from kvmesh.frontend.http.bodies import LARGE, check_text
from kvmesh.frontend.http.json_bounds import DEAR, MAX_VALUES, check_arguments, check_values
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
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


def test_many_tokens_are_written_as_few() -> None:
    wanted = list(range(3 * 2**14 + 5))
    for ids in (wanted, wanted[:1]):
        answer = Tokenize().answer([array("I", ids).tobytes()], CONTEXT)
        told = msgspec.json.decode(answer)
        assert told == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}


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


def test_sealed_thinking_is_bounded_for_a_whole_request() -> None:
    item = {"type": "reasoning", "encrypted_content": seal("0" * (9 << 20))}
    assert len(item["encrypted_content"]) < 100_000
    user = {"type": "message", "role": "user", "content": "x"}
    call = Responses().parse(msgspec.json.encode({"model": "m", "input": [item, user]}), {})
    assert len(call.request.messages) == 2
    with pytest.raises(InvalidRequest) as error:
        Responses().parse(msgspec.json.encode({"model": "m", "input": [item, item]}), {})
    assert error.value.param == "input[1].encrypted_content"


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
