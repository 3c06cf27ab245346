"""Guided decoding of the torch engine: random logits give output that satisfies the constraint."""

import asyncio
import itertools
import json
import re

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import jsonschema
import msgspec
import torch
from support.wait import PATIENCE_S
from tokenizers import Tokenizer

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.demo import model_dir
from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.structural_tags import calls_in_text, structural_tag
from kvmesh.worker.engine import Rejected
from kvmesh.worker.engines.torch.constraints.guided import COMPILE_THREADS, GrammarCache
from kvmesh.worker.engines.torch.model.sampling import Sampler

VOCABULARY = 8200
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": "<tool_call>\n",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "\n</tool_call>",
}


@pytest.fixture(scope="module")
def grammars() -> GrammarCache:
    made = GrammarCache(model_dir(), VOCABULARY, [8184, 8182])
    made.load()
    return made


def generate(
    grammars: GrammarCache, kind: str, value: object, seed: int = 0, count: int = 400
) -> str:
    """The constrained output of a model with random logits."""
    text = value if isinstance(value, str) else json.dumps(value)
    guided = Guided(kind=kind, value=text)  # type: ignore[arg-type]
    sampling = Sampling(max_tokens=count, temperature=1.0, seed=seed, guided=guided)
    sampler = Sampler(sampling, [], [], frozenset(), 0, grammars.constraint(guided))
    tokens = []
    for index in range(count):
        torch.manual_seed(1000 * seed + index)
        sampled = sampler.sample(torch.randn(VOCABULARY), index)
        tokens.append(sampled.token)
        if sampled.stop:
            break
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    found: str = tokenizer.decode(tokens, skip_special_tokens=False)
    return found.removesuffix("<|im_end|>").removesuffix("<|endoftext|>")


@pytest.mark.parametrize("seed", range(4))
def test_json_schemas(grammars: GrammarCache, seed: int) -> None:
    jsonschema.validate(json.loads(generate(grammars, "json_schema", SCHEMA, seed)), SCHEMA)


def test_keywords_that_restrict_nothing_are_no_reason_to_refuse(grammars: GrammarCache) -> None:
    """As zod writes records and prefixes, and Pydantic bytes; `format` may also name a property."""
    record = {
        "propertyNames": {"type": "string"},
        "additionalProperties": {"const": {"format": "x"}},
    }
    properties = {
        "format": {"type": "string", "format": "binary", "maxLength": 4},
        "path": {"type": "string", "format": "starts_with", "pattern": "^a/b$"},
        "record": {"type": "object", "maxProperties": 1, **record},
        "many": {"type": "array", "items": {"enum": ["x"], "format": "jwt"}, "maxItems": 1},
        "day": {"type": "string", "format": "date"},
    }
    required = {"required": [*properties], "additionalProperties": False}
    schema = {"type": "object", "properties": properties, **required}
    begin, end = "<tool_call>\n", "\n</tool_call>"
    tag = {**CALL, "content": {"type": "json_schema", "json_schema": schema}}
    whole = generate(grammars, "json_schema", schema)
    called = generate(grammars, "structural_tag", {"type": "structural_tag", "format": tag})
    for text in (whole, called.removeprefix(begin).removesuffix(end)):
        value = json.loads(text)
        assert list(value) == [*properties]
        assert value["path"] == "a/b"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["day"])
        assert all(each == {"format": "x"} for each in value["record"].values())
    with pytest.raises(Rejected, match="propertyNames"):
        generate(grammars, "json_schema", {"propertyNames": {"pattern": "^a"}})


async def compiled(kind: str, value: object) -> GrammarCache:
    """A cache with this constraint compiled, as in a worker; raises Rejected."""
    made = GrammarCache(model_dir(), VOCABULARY, [8184, 8182], timeout_s=PATIENCE_S)
    made.load()
    text = value if isinstance(value, str) else json.dumps(value)
    guided = Guided(kind=kind, value=text)  # type: ignore[arg-type]
    try:
        await made.compile(guided)
        assert guided in made
    finally:
        made.close()
    return made


async def test_the_event_loop_runs_while_a_large_schema_is_compiled() -> None:
    schema = {"enum": [f"{number:040d}" for number in range(10_000)]}
    compiling = asyncio.create_task(compiled("json_schema", schema))
    entries = 0
    while not compiling.done():
        await asyncio.sleep(0.001)
        entries += 1
    await compiling
    assert entries > 3


async def test_a_schema_too_deep_or_too_large_fails_in_the_trial_process() -> None:
    names = [f"r{number}" for number in range(9000)]
    rules = [f'{name}: "{name}" /[a-z]/ {after}?' for name, after in itertools.pairwise(names)]
    deep = "\n".join([f"start: {' | '.join(names)}", *rules, f'{names[-1]}: "x"'])
    with pytest.raises(Rejected, match="too much time, memory or stack"):
        await compiled("grammar", deep)


async def test_a_trial_that_times_out_is_stopped_and_the_next_one_runs() -> None:
    made = GrammarCache(model_dir(), VOCABULARY, [8184, 8182], timeout_s=PATIENCE_S)
    made.load()
    slow = {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(200)]}
    for _ in range(COMPILE_THREADS + 1):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await made.compile(Guided(kind="json_schema", value=json.dumps(slow)))
    await made.compile(Guided(kind="regex", value="a+"))
    made.close()


async def test_an_unsatisfiable_schema_is_rejected_at_once() -> None:
    cases = [{"properties": {f"k{n}": {"const": n}}, "required": [f"k{n}"]} for n in range(2500)]
    with pytest.raises(Rejected, match=r"cannot follow this json_schema: .*max is 2000"):
        await compiled("json_schema", {"anyOf": cases})


def test_an_answer_whose_constraint_grows_too_complex_fails(grammars: GrammarCache) -> None:
    guided = Guided(kind="regex", value="[a-z0-9]{1,64}" * 20_000)
    sampling = Sampling(max_tokens=400, temperature=1.0, seed=0, guided=guided)
    sampler = Sampler(sampling, [], [], frozenset(), 0, grammars.constraint(guided))
    torch.manual_seed(0)
    sampled = (sampler.sample(torch.randn(VOCABULARY), index) for index in range(400))
    last = next(each for each in sampled if each.stop)
    assert "too complex" in last.error


def test_choices_and_patterns(grammars: GrammarCache) -> None:
    choices = ["yes", 'no "really"', "<think>"]
    assert {generate(grammars, "choice", choices, seed) for seed in range(30)} == set(choices)
    assert re.fullmatch(r"[a-c]{3}/\d{1,4}", generate(grammars, "regex", r"[a-c]{3}/[0-9]{1,4}"))
    lark = 'start: "say " WORD "!"\nWORD: /[a-z]{2,5}/'
    assert re.fullmatch(r"say [a-z]{2,5}!", generate(grammars, "grammar", lark))


def test_a_tool_call_between_special_tokens(grammars: GrammarCache) -> None:
    answer = generate(grammars, "structural_tag", {"format": CALL})
    body = answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert len(body) == len(answer) - len("<tool_call>\n\n</tool_call>")
    jsonschema.validate(json.loads(body), SCHEMA)


@pytest.mark.parametrize(
    ("tree", "pattern"),
    [
        ({"type": "const_string", "value": 'a "b"\n'}, r'a "b"\n'),
        ({"type": "or", "elements": [{"type": "const_string", "value": "x"}]}, "x"),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "n="},
                    {"type": "regex", "pattern": "[0-9/]{2}"},
                ],
            },
            "n=[0-9/]{2}",
        ),
        (
            {
                "type": "tags_with_separator",
                "separator": ",",
                "tags": [
                    {
                        "type": "tag",
                        "begin": "(",
                        "content": {"type": "regex", "pattern": "[ab]"},
                        "end": ")",
                    }
                ],
            },
            r"(\([ab]\)(,\([ab]\))*)?",
        ),
    ],
)
def test_structural_tags(grammars: GrammarCache, tree: object, pattern: str) -> None:
    assert re.fullmatch(pattern, generate(grammars, "structural_tag", {"format": tree}))


def test_a_trigger_starts_its_tag(grammars: GrammarCache) -> None:
    tag = {
        "type": "tag",
        "begin": "[[call ",
        "content": {"type": "regex", "pattern": "[0-9]{2}"},
        "end": "]]",
    }
    node = {"type": "triggered_tags", "triggers": ["[[call"], "tags": [tag]}
    matcher = grammars.constraint(
        Guided(kind="structural_tag", value=json.dumps({"format": {**node, "at_least_one": True}}))
    )
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    for token in tokenizer.encode("Let me see. [[call", add_special_tokens=False).ids:
        assert matcher.allowed()[token]
        matcher.advance(token)
    allowed = {tokenizer.decode([int(t)]) for t in matcher.allowed().nonzero()}
    assert allowed <= {" ", *(f" {d}" for d in "0123456789"), *(f" {d:02}" for d in range(100))}


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", "{nonsense", "malformed"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable"),
        ("regex", "(", "unclosed group"),
        ("choice", "[]", "array of strings"),
        ("grammar", "start: missing", "unknown name"),
        ("structural_tag", '{"format": {"type": "huh"}}', "unknown structural tag"),
        ("structural_tag", "{}", "needs `format`"),
    ],
)
def test_malformed_or_unsatisfiable_constraints_are_rejected(
    grammars: GrammarCache, kind: str, value: str, reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        generate(grammars, kind, value)


CALLS = [Tool("book", "", SCHEMA, strict=True), Tool("list", "", {})]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("Let me see.", True),
        ("<think>\nHm.\n</think>\n\nLet me see.", True),
        ('<tool_call>\n{"name": "list", "arguments": {"any": [1]}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>\n' * 2, True),
        ('I look.\n<tool_call>\n{"name": "book", "arguments": {"any": [1]}}', False),
        ('<tool_call>\n{"name": "other"', False),
        ("<tool_call> says", False),
    ],
)
def test_calls_of_strict_tools_fit_at_any_position(
    grammars: GrammarCache, text: str, fits: bool
) -> None:
    node = calls_in_text("hermes", CALLS, strict_only=True)
    assert node is not None
    tags = msgspec.json.encode(structural_tag(node)).decode()
    matcher = grammars.constraint(Guided(kind="structural_tag", value=tags))
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    allowed: list[bool] = []
    for token in tokens:
        allowed.append(bool(matcher.allowed()[token]))
        matcher.advance(token)
    assert all(allowed) is fits


def test_a_trigger_spelled_as_text_is_excluded_from_free_text(grammars: GrammarCache) -> None:
    tag = {
        "type": "tag",
        "begin": "[[call ",
        "content": {"type": "regex", "pattern": "[0-9]{2}"},
        "end": "]]",
    }
    tree = {"type": "triggered_tags", "triggers": ["[[call"], "tags": [tag]}
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    for text, fits in (("a <think> [[call 12]] b", True), ("[[ca", True), ("a [[call me", False)):
        matcher = grammars.constraint(
            Guided(kind="structural_tag", value=json.dumps({"format": tree}))
        )
        allowed = []
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            allowed.append(bool(matcher.allowed()[token]))
            matcher.advance(token)
        assert all(allowed) is fits, text
