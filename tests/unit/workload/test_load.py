"""The load generators and accounting of the benchmark scripts."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from chat_load import Connection, LoadError, chat, drive, has_token, prompts
from common import Report, cpu_seconds, measure, percentile, rss_bytes
from support.chat_server import ChatServer

from kvmesh.demo import model_dir


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ChatServer]:
    async with ChatServer() as server:
        yield server


def bodies(count: int, stream: bool = True) -> list[bytes]:
    return [chat([{"role": "user", "content": f"ask {i}"}], 3, stream) for i in range(count)]


async def test_every_body_is_sent_once(server: ChatServer) -> None:
    timings = await drive(server.url, iter(bodies(20)), 4)
    asked = sorted(request["messages"][0]["content"] for request in server.requests)
    assert asked == sorted(f"ask {i}" for i in range(20))
    assert len(timings) == 20
    assert all(0 < t.first_s <= t.total_s for t in timings)


async def test_plain_answers_are_followed_to_their_end(server: ChatServer) -> None:
    timings = await drive(server.url, iter(bodies(5, stream=False)), 2)
    assert len(timings) == 5


async def test_a_refusal_is_an_error_with_the_servers_words(server: ChatServer) -> None:
    server.fail = {1: 503}
    with pytest.raises(LoadError, match="refused"):
        await drive(server.url, iter(bodies(4)), 1)


async def test_a_blocking_connection_times_the_first_token(server: ChatServer) -> None:
    def converse() -> list[float]:
        connection = Connection(server.url)
        timings = [connection.stream(body) for body in bodies(3)]
        connection.close()
        assert all(t.first_s <= t.total_s for t in timings)
        return [t.first_s for t in timings]

    assert all(first > 0 for first in await asyncio.to_thread(converse))


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (b'{"delta":{"role":"assistant","content":""}}', False),
        (b'{"content":""} {"content":"a"}', True),
        (b'{"reasoning_content":"hm"}', True),
        (b"", False),
    ],
)
def test_a_role_is_not_a_token(seen: bytes, found: bool) -> None:
    assert has_token(seen) is found


def test_prompts_have_the_asked_length_and_differ() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    texts = prompts(1, 50)
    one, other = next(texts), next(texts)
    assert one != other
    assert len(tokenizer.encode(one).ids) == 50


def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    pid = os.getpid()
    with measure({"me": pid}) as interval:
        until = cpu_seconds(pid) + 0.05
        while cpu_seconds(pid) < until:
            time.perf_counter()
    assert interval.of("m") == interval.total_s >= 0.04
    assert interval.wall_s >= 0.04
    assert rss_bytes(pid) > 1 << 20


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([1], 0.99) == 1


def test_a_report_is_a_table_json_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("figures", "peer")
    report.add_runs("speed", [1.0, 3.0, 2.0], "m/s", "5", "≥ 4")
    report.finish("2 m/s", tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"][0]["value"] == 2.0
    assert written["rows"][0]["spread"] == "1–3"
    assert written["summary"] == "2 m/s"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 m/s"
    assert any("speed" in line and "≥ 4" in line for line in lines)
