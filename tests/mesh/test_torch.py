"""A real model behind the whole mesh: `kvmesh model tiny`, `kvmesh up --engine torch`, all APIs."""

import itertools
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.trials import is_running, trial_process
from support.up import Up
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Role
from kvmesh.bus.streams.configuration import StreamLimits

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

PROCESSES = 5  # with metrics ports: indexer, router, kvbm, two workers
LONG = "What one worker has computed, another need not compute again. " * 12


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder: Path = tmp_path_factory.mktemp("torch")
    done = forks.run(["model", "tiny", str(folder / "tiny")], os.environ)
    assert "kvmesh up --engine torch --model" in done.stdout, done.stderr
    options = ["--engine", "torch", "--model", str(folder / "tiny"), "--workers", "2"]
    options += ["--kvbm", "--kvbm-host-bytes", str(64 << 20)]
    options += ["--kvbm-directory", str(folder / "node")]
    up = Up(folder, *options, "--torch-threads", "1", metrics=PROCESSES)
    up.start()
    yield up
    up.close()


def post(up: Up, path: str, **body: object) -> dict[str, Any]:
    request = urllib.request.Request(
        up.url + path,
        json.dumps({"model": "tiny", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def chat(up: Up, text: str, **fields: object) -> dict[str, Any]:
    return post(up, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)


async def test_every_api_answers_and_a_cached_prompt_has_the_same_answer(up: Up) -> None:
    await up.ready()
    first = chat(up, LONG, max_tokens=12, temperature=0)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    async def cached() -> bool:
        again = chat(up, LONG, max_tokens=12, temperature=0)
        assert first["choices"][0]["message"] == again["choices"][0]["message"]
        return bool(again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100)

    await eventually(cached)
    message = {"role": "user", "content": "Hi"}
    anthropic = post(up, "/v1/messages", messages=[message], max_tokens=5, temperature=0)
    assert anthropic["usage"]["output_tokens"] == 5
    response = post(up, "/v1/responses", input="Hi", max_output_tokens=5, temperature=0)
    assert response["usage"]["output_tokens"] == 5
    assert post(up, "/v1/completions", prompt="Hi", max_tokens=5, temperature=0)["choices"][0][
        "text"
    ]


async def test_the_phases_of_a_start_add_up(up: Up) -> None:
    await up.ready()
    bus = await Bus.connect(up.options, "test")
    directory = Directory(bus, StreamLimits(), role=Role.WORKER)
    await directory.open()
    cards = directory.instances
    await directory.close()
    await bus.close()
    assert len(cards) == 2
    for card in cards:
        took = {phase.name: phase.seconds for phase in card.phases}
        assert list(took) == [
            *("process", "imports", "configuration", "weights", "KV allocation", "warm-up"),
            *("engine", "registration", "routable"),
        ]
        assert min(took.values()) >= 0
        assert took["imports"] > 0.5, "torch is large"
        assert sum(took.values()) == pytest.approx(card.startup_s, rel=0.1)
    for phase in ("process", "imports", "weights"):
        told = sum(p.seconds for card in cards for p in card.phases if p.name == phase)
        exported = metric(up, "kvmesh_worker_start_seconds", f'phase="{phase}"')
        assert exported == pytest.approx(told, abs=0.01)


async def test_an_unsupported_constraint_is_refused_before_a_stream_opens(
    up: Up,
) -> None:
    await up.ready()
    for pattern, reason in (("(?:a|b){9}$c", "cannot follow"), ("a" * 600_000, "bytes")):
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
        form: dict[str, object] = {"type": "json_schema"}
        form["json_schema"] = {"name": "s", "schema": schema}
        error = await eventually(partial(refusal, up, form))
        assert error is not None
        assert error.code == 400
        assert reason in json.load(error)["error"]["message"]


def refusal(up: Up, form: dict[str, object]) -> urllib.error.HTTPError | None:
    """The refusal of a stream; None if it opens, as while a busy worker has yet to try anything."""
    try:
        chat(up, "Hi", max_tokens=9, response_format=form, stream=True)
    except urllib.error.HTTPError as error:
        return error
    except json.JSONDecodeError:  # events
        return None
    raise AssertionError("a stream is no JSON")


async def test_a_random_model_follows_a_schema(up: Up) -> None:
    await up.ready()
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"enum": [1, 2, 3]}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}}
    answer = chat(up, "Which?", max_tokens=200, response_format=form)
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert found["colour"] in ("red", "green")
    assert found["count"] in (1, 2, 3)
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_constraints_are_tried_although_trial_processes_freeze(up: Up) -> None:
    await up.ready()

    def follow(word: str) -> str:
        schema = {"type": "object", "properties": {"a": {"enum": [word]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
        answer = chat(up, f"Say {word}.", max_tokens=200, response_format=form)
        return str(answer["choices"][0]["message"]["content"])

    workers = [pid for name, pid in up.children().items() if name.startswith("worker")]
    words = (f"word {number}" for number in itertools.count())

    async def tried() -> list[int]:
        """The trial processes, once each worker has one: its first constraint starts it."""
        follow(next(words))
        return [trial_process(worker) for worker in workers]

    frozen = await eventually(tried)
    for process in frozen:
        os.kill(process, signal.SIGSTOP)

    async def replaced() -> bool:
        word = next(words)
        assert word in follow(word)
        return not any(is_running(process) for process in frozen)

    await eventually(replaced)


def metric(up: Up, name: str, label: str = "") -> float:
    """A metric of all processes, summed over all labels or those with `label`."""
    lines: list[str] = []
    for port in (up.port, *range(up.metrics_port, up.metrics_port + PROCESSES)):
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S
        ) as answer:
            lines += answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def started_requests(up: Up) -> float:
    """Number of requests that the workers have started, once it no longer changes."""
    seen: list[float] = []

    def steady() -> bool:
        seen.append(metric(up, "kvmesh_worker_requests_total"))
        return len(seen) > 40 and len(set(seen[-40:])) == 1

    await eventually(steady)
    return seen[-1]


async def wait_until_idle(up: Up, requests: float) -> None:
    """Wait until the workers have started this many requests and none is left."""
    await eventually(
        lambda: (
            metric(up, "kvmesh_worker_requests_total") >= requests
            and metric(up, "kvmesh_worker_running_requests") == 0
            and metric(up, "kvmesh_worker_waiting_requests") == 0
        ),
        timeout=60,
    )


async def test_a_prefetched_prompt_is_computed_when_its_request_comes(up: Up) -> None:
    await up.ready()
    messages = [{"role": "user", "content": f"Ahead of time: {LONG}"}]
    before = await started_requests(up)
    sent = post(up, "/v1/prefetch", messages=messages, compute=4096)
    await wait_until_idle(up, before + 1)
    same_worker = {"backend_instance_id": sent["instance"]}
    answer = post(up, "/v1/chat/completions", messages=messages, max_tokens=4, nvext=same_worker)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == sent["blocks"] * 16


async def test_a_hinted_turn_finds_its_prefix_computed(up: Up) -> None:
    await up.ready()
    sentence = "Word for word, and nothing else than that. " * 4
    schema = {"type": "object", "properties": {"a": {"enum": [sentence]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    messages = [{"role": "user", "content": f"Please say: {sentence}"}]
    hint = {"agent_hints": {"speculative_prefill": True}, "extra_fields": ["worker_id"]}
    before = await started_requests(up)
    first = chat_on(up, messages, response_format=form, max_tokens=900, nvext=hint)
    await wait_until_idle(up, before + 2)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "More."}]
    same_worker = {"backend_instance_id": first["nvext"]["worker_id"]["instance"]}
    chat_on(up, messages, max_tokens=4, nvext=same_worker)
    ahead = "kvmesh_frontend_speculative_tokens_total"
    await eventually(lambda: metric(up, ahead, "useful") > 0)
    assert metric(up, ahead, "wasted") == 0


def chat_on(up: Up, messages: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    return post(up, "/v1/chat/completions", messages=messages, temperature=0, **fields)


async def test_computed_blocks_are_credited_to_both_workers(up: Up) -> None:
    """The engine's blocks to one worker, those in the node's memory to the other."""
    await up.ready()
    fields: dict[str, object] = {"max_tokens": 2, "nvext": {"extra_fields": ["routing"]}}

    async def credited() -> bool:
        routing = chat(up, f"Shared. {LONG}", **fields)["nvext"]["routing"]
        own, lower = routing["chosen"]["overlap"][0], routing["best_rejected"]["overlap"][1]
        return bool(own > 5 and lower > 5)

    await eventually(credited)
