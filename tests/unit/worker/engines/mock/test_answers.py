"""Answers of the mock: readable, deterministic, and of the requested length."""

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import Tokenizer

from kvmesh.bus.messages import Guided, Sampling, Work
from kvmesh.demo import model_dir
from kvmesh.hashing import FIRST_IMAGE_TOKEN
from kvmesh.worker.engines.mock.engine import _check_tokens
from kvmesh.worker.engines.mock.text.author import (
    AnswerOptions,
    AnswerWriter,
    ConcatenatedTokens,
    FixedTokens,
    MockAnswer,
)
from kvmesh.worker.engines.mock.text.guided import UnsupportedConstraint
from kvmesh.worker.engines.mock.text.script import Script, ScriptEntry, ScriptError
from kvmesh.worker.engines.mock.text.source import PASSAGE, TextReading, TextSource

TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
TEXT = TextSource(TOKENIZER)
OPTIONS = AnswerOptions(context=1000, output_tokens=50)
AUTHOR = AnswerWriter(TEXT, OPTIONS)
THINKER = AnswerWriter(TEXT, AnswerOptions(1000, 50, reasoning_tokens=30))


def work(count: int = 10, generated: int = 0, **sampling: object) -> Work:
    tokens = array("I", range(count)).tobytes()
    chosen = replace(Sampling(max_tokens=20), **sampling)
    return Work(request="a", frontend="f", tokens=tokens, sampling=chosen, generated=generated)


def work_of_text(text: str, **sampling: object) -> Work:
    tokens = array("I", TOKENIZER.encode(text, add_special_tokens=False).ids).tobytes()
    return replace(work(1, 0, **sampling), tokens=tokens)


def answer_tokens(whole: MockAnswer) -> list[int]:
    return whole.source.slice(0, whole.target)


def text_of(whole: MockAnswer) -> str:
    text: str = TOKENIZER.decode(answer_tokens(whole), skip_special_tokens=False)
    return text


@given(st.integers(0, 1000), st.integers(0, 2000), st.integers(0, 40), st.integers(0, 40))
def test_a_reading_is_one_endless_text(seed: int, start: int, first: int, second: int) -> None:
    reading = TextReading(TEXT, seed)
    whole = reading.slice(start, start + first + second)
    assert len(whole) == first + second
    assert whole[:first] == reading.slice(start, start + first)
    assert whole[first:] == reading.slice(start + first, start + first + second)


@pytest.mark.parametrize("seed", range(len(TEXT.paragraphs)))
def test_an_answer_is_a_paragraph_whose_text_has_the_same_tokens(seed: int) -> None:
    tokens = TextReading(TEXT, seed).slice(0, 100)
    text = TOKENIZER.decode(tokens)
    assert text[0].isupper()
    assert text.split("\n\n")[0] in PASSAGE
    assert TOKENIZER.encode(text, add_special_tokens=False).ids[:99] == tokens[:99]


def test_the_prompt_and_the_seed_choose_the_answer() -> None:
    answers = {tuple(answer_tokens(AUTHOR.answer(work(n)))) for n in range(1, 40)}
    assert len(answers) > 6
    seeds = {tuple(answer_tokens(AUTHOR.answer(work(seed=s)))) for s in range(40)}
    assert len(seeds) > 6
    assert answer_tokens(AUTHOR.answer(work())) == answer_tokens(AUTHOR.answer(work()))


def test_a_migration_does_not_change_the_answer() -> None:
    whole = AUTHOR.answer(work(10))
    moved = AUTHOR.answer(work(14, generated=4))
    assert answer_tokens(moved) == answer_tokens(whole)


@pytest.mark.parametrize(
    ("item", "target", "finish"),
    [
        (work(max_tokens=20), 20, "length"),
        (work(max_tokens=900, ignore_eos=True), 900, "length"),
        (work(max_tokens=2000, ignore_eos=True), 990, "length"),
        (work(max_tokens=2000, min_tokens=77), 77, "stop"),
        (work(980, max_tokens=2000), 20, "length"),
    ],
)
def test_the_length_of_an_answer(item: Work, target: int, finish: str) -> None:
    whole = AUTHOR.answer(item)
    assert (whole.target, whole.finish) == (target, finish)


def test_an_answer_ends_by_itself_around_its_usual_length() -> None:
    lengths = {
        (whole.target, whole.finish)
        for n in range(1, 80)
        for whole in [AUTHOR.answer(work(n, max_tokens=900))]
    }
    assert {finish for _, finish in lengths} == {"stop"}
    assert len(lengths) > 20
    assert min(lengths)[0] >= 25
    assert max(lengths)[0] <= 76


def test_a_stop_token_ends_the_output() -> None:
    tokens = answer_tokens(AUTHOR.answer(work()))
    at = tokens.index(tokens[7])
    whole = AUTHOR.answer(work(stop_token_ids=[tokens[7]]))
    assert (whole.target, whole.finish) == (at + 1, "stop")
    late = AUTHOR.answer(work(stop_token_ids=[tokens[at]], min_tokens=at + 1))
    assert late.target > at + 1


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 60), st.integers(0, 60))
def test_a_spliced_source_is_one_text(head: int, rest: int, start: int, length: int) -> None:
    tokens = list(range(head + rest))
    spliced = ConcatenatedTokens(tokens[:head], FixedTokens(tokens[head:]))
    assert spliced.slice(start, start + length) == tokens[start : start + length]


def test_thinking_comes_first_and_the_answer_after_it() -> None:
    whole = THINKER.answer(work(max_tokens=2000))
    thoughts, _, rest = text_of(whole).partition("\n</think>\n\n")
    assert thoughts.startswith("<think>\n")
    assert rest[0].isupper()
    assert rest.split("\n\n")[0] in PASSAGE
    assert whole.finish == "stop"


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n", ""),
    ],
)
def test_thinking_begins_where_the_prompt_left_off(prompt: str, start: str) -> None:
    text = text_of(THINKER.answer(work_of_text(prompt, max_tokens=900)))
    assert text.startswith(start)
    assert text.count("<think>") == bool(start)
    assert text.count("</think>") == 1


def test_a_prompt_that_forbids_thinking_gets_none() -> None:
    text = text_of(THINKER.answer(work_of_text("<|im_start|>assistant\n<think>\n\n</think>\n\n")))
    assert "think>" not in text


def test_a_guided_answer_ends_by_itself_and_is_cut_by_its_bound() -> None:
    guided = Guided(kind="choice", value='["yes, certainly"]')
    whole = AUTHOR.answer(work(guided=guided))
    assert (text_of(whole), whole.finish) == ("yes, certainly", "stop")
    cut = AUTHOR.answer(work(guided=guided, max_tokens=1))
    assert (cut.target, cut.finish) == (1, "length")
    with pytest.raises(UnsupportedConstraint, match="no grammars"):
        AUTHOR.answer(work(guided=Guided(kind="grammar", value="root ::= x")))


def test_tags_that_only_a_trigger_begins_leave_the_answer_as_it_is() -> None:
    call = {"type": "json_schema", "json_schema": {"type": "object"}}
    tag = {"type": "tag", "begin": "<tool_call>", "content": call, "end": "</tool_call>"}
    tree: dict[str, object] = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}
    free = Guided(kind="structural_tag", value=json.dumps({"format": tree}))
    assert text_of(AUTHOR.answer(work(guided=free))) == text_of(AUTHOR.answer(work()))
    must = Guided(kind="structural_tag", value=json.dumps({"format": {**tree, "at_least_one": 1}}))
    assert text_of(AUTHOR.answer(work(guided=must))).startswith("<tool_call>")


SCRIPT = Script(
    [
        ScriptEntry(text="first", session="s", turn=0),
        ScriptEntry(text="<think>\nhm\n</think>\n\nsecond", session="s"),
        ScriptEntry(text="on weather", match=r"weather\?$"),
    ]
)


@pytest.mark.parametrize(
    ("session", "turn", "prompt", "text"),
    [
        ("s", 0, "x", "first"),
        ("s", 3, "x", "<think>\nhm\n</think>\n\nsecond"),
        (None, 0, "how is the weather?", "on weather"),
    ],
)
def test_a_script_answers_the_turns_that_it_knows(
    session: str | None, turn: int, prompt: str, text: str
) -> None:
    author = AnswerWriter(TEXT, OPTIONS, SCRIPT)
    item = replace(work_of_text(prompt, max_tokens=100), session=session, turn=turn)
    whole = author.answer(item)
    assert (text_of(whole), whole.finish) == (text, "stop")


def test_requests_without_a_script_entry_get_the_default_answer() -> None:
    author = AnswerWriter(TEXT, OPTIONS, SCRIPT)
    assert answer_tokens(author.answer(work())) == answer_tokens(AUTHOR.answer(work()))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2"),
        ('{"turn": 1}', "text"),
        ('{"text": ""}', "length"),
        ('{"text": "a", "turns": 1}', "turns"),
        ('{"text": "a", "match": "("}', "line 2"),
    ],
)
def test_a_bad_script_is_named_by_file_and_line(tmp_path: Path, line: str, fault: str) -> None:
    file = tmp_path / "script.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ScriptError, match=fault) as caught:
        Script.load(file)
    assert str(file) in str(caught.value)
    with pytest.raises(ScriptError, match="cannot read"):
        Script.load(tmp_path / "missing")


def test_a_good_script_is_read(tmp_path: Path) -> None:
    file = tmp_path / "script.jsonl"
    file.write_text('{"text": "a", "session": "s", "turn": 2}\n\n{"text": "b"}\n')
    script = Script.load(file)
    found = [script.find("s", turn, "") for turn in (1, 2)]
    assert [entry.text for entry in found if entry is not None] == ["b", "a"]


@pytest.mark.parametrize(
    ("prompt", "bias", "beyond"),
    [
        ([], {}, None),
        ([1, 99, FIRST_IMAGE_TOKEN, 2**32 - 1], {99: 1.0}, None),
        ([1, 100, 2], {}, 100),
        ([FIRST_IMAGE_TOKEN, FIRST_IMAGE_TOKEN - 1], {}, FIRST_IMAGE_TOKEN - 1),
        ([1], {100: 1.0}, 100),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_but_for_those_of_images(
    prompt: list[int], bias: dict[int, float], beyond: int | None
) -> None:
    asked = replace(work(logit_bias=bias), tokens=array("I", prompt).tobytes())
    if beyond is None:
        _check_tokens(asked, 100)
        return
    with pytest.raises(ValueError, match=f"token {beyond} is not in the model's vocabulary"):
        _check_tokens(asked, 100)
