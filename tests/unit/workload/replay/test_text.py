"""Spelling prompts in words, and parsing a stream however its bytes are split."""

import pytest
from tokenizers import Tokenizer

from kvmesh.demo import model_dir
from kvmesh.workload.replay.chat_client import Sample, StreamReading, message_of, reason
from kvmesh.workload.replay.summary import kind, spread, summarize
from kvmesh.workload.replay.text import Speller
from kvmesh.workload.tree import Tree


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


def test_a_prompt_has_its_tokens_and_shares_its_prefix(tokenizer: Tokenizer) -> None:
    tree = Tree()
    trunk = tree.fork()
    speller = Speller(tree)
    one = tokenizer.encode(speller.prompt(tree.fork(trunk, 200), 500)).ids
    other = tokenizer.encode(speller.prompt(tree.fork(trunk, 200), 300)).ids
    assert (len(one), len(other)) == (500, 300)
    assert one[:200] == other[:200]
    assert one[200:300] != other[200:300]


def test_a_grown_prompt_begins_with_the_old_one() -> None:
    tree = Tree()
    branch = tree.fork()
    speller = Speller(tree, tokens_per_word=1.7, overhead=9)
    assert speller.prompt(branch, 900).startswith(speller.prompt(branch, 400))


def test_overhead_and_words_of_several_tokens_are_taken_off() -> None:
    tree = Tree()
    branch = tree.fork()
    assert len(Speller(tree, overhead=10).prompt(branch, 110).split()) == 100
    assert len(Speller(tree, tokens_per_word=2.0).prompt(branch, 100).split()) == 50
    assert len(Speller(tree, overhead=10).prompt(branch, 3).split()) == 1


STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\r\n\r\n'
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_is_parsed_however_it_is_split(size: int) -> None:
    sample = Sample(index=0)
    reading = StreamReading(sample, None)
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert any(reading.feed(piece) for piece in pieces)
    reading.end()
    assert sample.error is None
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) == (9, 4, 2)
    assert sample.ttft_s is not None
    assert sample.inter_token_s is not None


def test_an_error_in_the_stream_is_the_samples_error() -> None:
    sample = Sample(index=0)
    reading = StreamReading(sample, None)
    reading.feed(b'data: {"error":{"message":"engine lost","code":502}}\n\n')
    reading.end()
    assert sample.error == "engine lost"


def test_aborting_early_is_no_error() -> None:
    sample = Sample(index=0)
    reading = StreamReading(sample, 1)
    assert reading.feed(STREAM[:200])
    reading.end()
    assert sample.aborted
    assert sample.error is None


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (503, b'{"error":{"message":"busy","type":"overloaded"}}', "503 busy"),
        (500, b"<html>oops</html>", "500 <html>oops</html>"),
        (404, b'{"error":"none"}', "404 none"),
    ],
)
def test_reasons_are_the_servers_own(status: int, body: bytes, text: str) -> None:
    assert reason(status, body) == text
    assert message_of({"type": "t"}) == "t"


def test_equal_errors_are_counted_together() -> None:
    errors = [f"503 worker-{n}-8f12970{n} left" for n in range(3)]
    samples = [Sample(index=n, error=error) for n, error in enumerate(errors)]
    summary = summarize(
        samples,
        {0: 1, 1: 1, 2: 1},
        1.0,
        trace="t",
        url="u",
        model="m",
        speed=1.0,
        concurrency=1,
    )
    assert summary.errors == {"503 … left": 3}
    assert summary.ttft_s is None


def test_short_words_and_counts_stay_in_an_error() -> None:
    assert kind("429 wait 1500 ms") == "429 wait 1500 ms"


def test_percentiles() -> None:
    found = spread(range(101))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (50, 90, 99, 100, 50)
    assert spread([]) is None
