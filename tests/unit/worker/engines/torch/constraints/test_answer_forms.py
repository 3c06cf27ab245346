"""The constraints that frontends make, under the torch engine's compiler."""

import itertools
import json
from collections.abc import Iterator
from random import Random

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from tokenizers import Tokenizer
from unit.frontend.dialects.test_embedded_schemas import WRITTEN, Tree, listed
from unit.frontend.preprocess.test_answer_form import (
    CHAT,
    CHOICES,
    PROMPTS,
    TEXTS,
    form_of,
    prompt_of,
    written,
)

from kvmesh.bus.messages import Guided
from kvmesh.demo import model_dir
from kvmesh.worker.engines.torch.constraints.grammar import MatcherFactory

FAMILIES = [
    ("hermes", "qwen3"),
    ("qwen3_coder", "nemotron_nano"),
    ("deepseek_v3", "deepseek_r1"),
    ("kimi_k2", "kimi_k25"),
    ("glm45", "glm45"),
    ("mistral", "mistral"),
    ("harmony", "harmony"),
]
TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
SIZE = TOKENIZER.get_vocab_size()


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    end = TOKENIZER.token_to_id("<|im_end|>")
    assert end is not None
    return MatcherFactory(model_dir(), SIZE, [end])


def accepts(factory: MatcherFactory, guided: Guided, texts: list[str]) -> Iterator[bool]:
    matcher = factory.make(guided)
    for text in texts:
        copy = matcher.deep_copy()
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        yield copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()


@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_every_form_is_followed(factory: MatcherFactory, family: tuple[str, str]) -> None:
    for choice, text, kind in itertools.product(CHOICES, TEXTS, PROMPTS):
        prompt = prompt_of(family, kind)
        if prompt is None:
            continue
        form = form_of(CHAT, family, choice, text, "tags").after(prompt, None)
        guided = form.constraint()
        if guided is None:
            continue
        outputs = [written(form, "tags", Random(seed)) for seed in range(4)]
        if form.begins_thinking and form.grammar.reasoning is not None:
            # where text may be thinking, this compiler reads it so
            outputs = [each for each in outputs if form.grammar.reasoning.end[0] in each]
        for output, good in zip(outputs, accepts(factory, guided, outputs), strict=True):
            assert good, (choice, text, kind, output)
        if form.text is not None or form.calls == "required":
            assert not any(accepts(factory, guided, ["A word of text.", "{]"])), (choice, text)


@pytest.mark.parametrize("name", [*WRITTEN, "pydantic"])
def test_embedded_schemas_are_followed(factory: MatcherFactory, name: str) -> None:
    tree = {"root": {"kind": "branch", "children": [{"kind": "leaf", "at": {"x": 1}}]}, "names": {}}
    schema, good, bad = WRITTEN.get(name, (Tree.model_json_schema(), [tree], [{"names": {}}]))
    guided = Guided(kind="json_schema", value=json.dumps(listed(schema)))
    assert all(accepts(factory, guided, [json.dumps([each]) for each in good]))
    assert not any(accepts(factory, guided, [json.dumps([each]) for each in bad]))
