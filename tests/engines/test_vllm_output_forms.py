"""The forms of answers under vLLM: their parsers read all that it writes under a constraint."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from support.stamp import STAMP
from support.vllm import VllmRun, prompt, work
from tokenizers import Tokenizer
from unit.frontend.dialects.test_embedded_schemas import WRITTEN, listed
from unit.frontend.preprocess.test_output_form import (
    CHAT,
    CHOICES,
    FAMILIES,
    PROMPTS,
    TEXTS,
    answer,
    described,
    encoded,
    form_of,
    parsed,
    prompt_of,
    written,
)

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.demo import model_dir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
END = TOKENIZER.token_to_id("</think>") or 0
# a model of random weights would never end its thinking, and fill JSON with white space
TEXTS_OF_TOKENS = ((i, TOKENIZER.decode([i])) for i in range(TOKENIZER.get_vocab_size()))
BIAS = {i: -100.0 for i, text in TEXTS_OF_TOKENS if text.strip() != text or not text} | {END: 100.0}
FAMILY = ("hermes", "deepseek_r1")
KIND: dict[str, Any] = {
    "$defs": {"Kind": {"enum": ["a", "b"]}},
    "type": "object",
    "properties": {"kind": {"$ref": "#/$defs/Kind"}},
    "required": ["kind"],
    "additionalProperties": False,
}
VALID = jsonschema.Draft202012Validator(KIND).is_valid
# by xgrammar itself: impossible values, and objects in an `enum` that are not compact
UNSUPPORTED = {"beside others", "data and names"}


def accepts(guided: Guided, text: str) -> bool:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    match guided.kind:
        case "structural_tag":
            grammar = xgrammar.Grammar.from_structural_tag(guided.value)
        case "json_schema":
            grammar = xgrammar.Grammar.from_json_schema(guided.value)
        case _:
            grammar = xgrammar.Grammar.builtin_json_grammar()
    return bool(_is_grammar_accept_string(grammar, text))


@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
async def test_every_form_is_followed(family: tuple[str, str]) -> None:
    tried: set[Guided] = set()
    for choice, text, kind in itertools.product(CHOICES, TEXTS, PROMPTS):
        end = prompt_of(family, kind)
        if end is None:
            continue
        form = form_of(CHAT, family, choice, text, "tags").after(end, None)
        guided = form.constraint()
        if guided is None or guided in tried:
            continue
        tried.add(guided)
        for seed in range(3):
            output = written(form, "tags", Random(seed))
            assert accepts(guided, output), (choice, text, kind, output)
        if form.text is not None or form.calls == "required":
            assert not accepts(guided, "A word of text."), (choice, text, kind)


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - UNSUPPORTED))
async def test_embedded_schemas_are_followed(name: str) -> None:
    schema, good, _ = WRITTEN[name]
    document = {"type": "array", **listed(schema)}
    guided = Guided(kind="json_schema", value=json.dumps(document))
    assert all(accepts(guided, json.dumps([each])) for each in good)
    assert not accepts(guided, '["no"]')


def form_with(choice: str, text: str, engine: str, end: str) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": KIND}}
    other = {"type": "function", "function": {"name": "g", "parameters": KIND}}
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool, other],
    }
    body |= {"tool_choice": choice, "parallel_tool_calls": False}  # else it would call for ever
    if text == "schema":
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": KIND}}
        body["response_format"] = schema
    request = CHAT.parse(encoded(body), {}, STAMP).request
    return described(request, FAMILY, engine).after(end, None)


CASES = [
    (choice, text, end)
    for choice, text in (("required", "free"), ("auto", "schema"), ("none", "schema"))
    for end in ("<think>\n", "<think>\n\n</think>\n\n")
]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["", "reasoning_parser=deepseek_r1"]
)
async def run(
    tiny_model: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[VllmRun, str]]:
    made = await VllmRun.start(tiny_model, *filter(None, [request.param]))
    assert made.info.structural_tags
    assert made.info.exempts_thinking == bool(request.param)
    yield made, "exempt" if request.param else "tags"
    await made.engine.close()


async def test_an_answer_has_its_form(run: tuple[VllmRun, str]) -> None:
    vllm, engine = run
    forms = {}
    for number, (choice, text, end) in enumerate(CASES):
        form = form_with(choice, text, engine, end)
        sampling = Sampling(max_tokens=200, seed=number, guided=form.constraint(), logit_bias=BIAS)
        tail = TOKENIZER.encode(end, add_special_tokens=False).ids
        tokens = prompt(40, first=number) + b"".join(t.to_bytes(4, "little") for t in tail)
        forms[f"r{number}"] = form
        vllm.engine.submit(work(f"r{number}", tokens, sampling=sampling))
    await asyncio.wait_for(vllm.ended(*forms), 120)
    for name, form in forms.items():
        output = TOKENIZER.decode(vllm.sink.tokens(name), skip_special_tokens=False)
        assert vllm.sink.finish(name) == "stop", output
        output = re.sub(r"<\|(im_end|endoftext)\|>$", "", output)
        got = answer(parsed(form, output, Random(0)))
        assert got == answer(parsed(form, output)), output
        assert bool(got.calls) != bool(got.text.strip()), (form.calls, output)
        if form.calls == "required":
            assert got.calls, output
        if got.text.strip():
            assert VALID(json.loads(got.text)), output
        assert all(VALID(json.loads(arguments)) for _, arguments in got.calls), output
