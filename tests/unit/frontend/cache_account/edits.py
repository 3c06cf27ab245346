"""Conversations, their prompts by real templates, and comparisons of two of them."""

import asyncio
from array import array
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from kvmesh.bus.messages import ModelCard, Sampling, SessionPrompt
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.transcript import Transcript
from kvmesh.frontend.cache_account.comparison import PromptComparison, compare
from kvmesh.frontend.cache_account.differences import AnswerForm, ComparedPrompt
from kvmesh.frontend.cache_account.fingerprints import fingerprints
from kvmesh.frontend.conversation import Block, GenerateRequest, Message, Tool
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor

TEMPLATES = Path(__file__).parents[1] / "dialects" / "templates"
FILES = {file.name: file.read_bytes() for file in model_dir().iterdir()}
NAMES = ("demo", *sorted(file.stem for file in TEMPLATES.glob("*.jinja")))


@cache
def model(template: str, source: str = "") -> ServedModel:
    """The demo model with a template of the tests' data, or with one of this source."""
    files = dict(FILES)
    if source:
        files["chat_template.jinja"] = source.encode()
    elif template != "demo":
        files["chat_template.jinja"] = (TEMPLATES / f"{template}.jinja").read_bytes()
    card = ModelCard(name="m", context=1 << 22, block_size=4, files=template)
    return ServedModel(card, Dialect(card, files), 0)


def request(messages: list[Message], tools: list[Tool]) -> GenerateRequest:
    sampling = Sampling(max_tokens=0)
    return GenerateRequest(id="r", model="m", sampling=sampling, messages=messages, tools=tools)


def prepared(asked: GenerateRequest, served: ServedModel) -> PreparedRequest:
    preprocessor = Preprocessor(1 << 20, TenantNamespaces())
    made = asyncio.run(preprocessor.prepare(asked, served, None))
    made.parts = fingerprints(made.request)
    return made


def decoder(served: ServedModel) -> Callable[[bytes], str]:
    def decode(tokens: bytes) -> str:
        detokenizer = served.dialect.detokenizers.create()
        return detokenizer.feed(array("I", tokens).tolist()) + detokenizer.finish()

    return decode


def earlier(before: PreparedRequest, output: str = "") -> SessionPrompt:
    """The stored prompt of a request that was answered with the output."""
    tokens = before.model.dialect.tokenizer.encode(output, add_special_tokens=False).ids
    packed = array("I", tokens).tobytes()
    prompt = before.prompts[0]
    return SessionPrompt(prompt.tokens, request="b", output=packed, done=True, parts=before.parts)


def compared(after: PreparedRequest, old: SessionPrompt) -> PromptComparison:
    served = after.model
    decode = decoder(served)

    def generated(of: SessionPrompt) -> list[Block]:
        parser = served.dialect.grammar.parser(after.request.tools, decode(of.tokens), eager=False)
        transcript = Transcript()
        for event in [*parser.feed(decode(of.output)), *parser.finish()]:
            transcript.add(event)
        return transcript.blocks(in_order=True)

    answers = AnswerForm(
        generated,
        lambda of: served.dialect.grammar.begins_thinking(decode(of.tokens)),
        served.dialect.template.drops_thinking(after.request),
    )
    prompt = ComparedPrompt(after.request, after.parts, after.encoded, decode, answers)
    tokens = after.prompts[0].tokens
    return compare(tokens, 0, old, partial(prompt.difference, old), decode)
