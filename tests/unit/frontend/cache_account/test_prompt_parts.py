"""The part of a request at a token of its rendered prompt."""

import asyncio
import json
from array import array
from collections.abc import Callable
from typing import Any

from support.stamp import STAMP

from kvmesh.bus.messages import ModelCard, PromptChange
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.cache_account.fingerprints import MAX_NAME
from kvmesh.frontend.cache_account.prompt_parts import char_offset, locate
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor
from kvmesh.hashing import TOKEN_BYTES

FILES = {file.name: file.read_bytes() for file in model_dir().iterdir()}
CARD = ModelCard(name="m", context=1 << 20, block_size=4, files="f")
MODEL = ServedModel(CARD, Dialect(CARD, FILES), 0)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"to {name}", "parameters": {}}}
    for name in ("read", "write")
]
MESSAGES = [
    {"role": "system", "content": "Be brief and friendly to everyone."},
    {"role": "user", "content": "The first question of the day."},
    {"role": "assistant", "content": "The answer to the question."},
    {"role": "user", "content": "A second question, then."},
]


def prepared(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> PreparedRequest:
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    request = Chat().parse(body, {}, STAMP).request
    preprocessor = Preprocessor(1 << 20, TenantNamespaces())
    return asyncio.run(preprocessor.prepare(request, MODEL, None))


def decoder() -> Callable[[bytes], str]:
    def decode(tokens: bytes) -> str:
        detokenizer = MODEL.dialect.detokenizers.create()
        return detokenizer.feed(array("I", tokens).tolist()) + detokenizer.finish()

    return decode


def at(text: str) -> PromptChange:
    """The part at the first token that begins after `text` in the prompt."""
    request, decode = prepared(MESSAGES, TOOLS), decoder()
    encoded = request.encoded
    assert encoded is not None
    end = encoded.text.index(text) + len(text)
    tokens = range(len(encoded.tokens) // TOKEN_BYTES)
    token = next(t for t in tokens if char_offset(encoded, decode, t) >= end)
    return locate(request.request, encoded, decode, token)


def test_tokens_of_each_part_are_found_with_their_offset() -> None:
    cases = [
        ("Be brief and", ("system", 0, "system")),
        ("to write", ("tool", 1, "write")),
        ("The first question", ("message", 0, "user")),
        ("The answer to", ("message", 1, "assistant")),
        ("A second question", ("message", 2, "user")),
    ]
    for text, part in cases:
        found = at(text)
        assert (found.part, found.index, found.name) == part, text
    assert at("The answer to").offset == len("The answer to")


def test_raw_prompts_have_one_part() -> None:
    request = prepared(MESSAGES, []).request
    assert locate(request, None, decoder(), 7) == PromptChange(token=7, part="prompt", way="")


def test_the_name_of_a_tool_is_bounded() -> None:
    name = "t" * 5000
    tool = {"type": "function", "function": {"name": name, "description": "x", "parameters": {}}}
    request = prepared(MESSAGES, [tool])
    encoded = request.encoded
    assert encoded is not None
    token = len(encoded.tokens) // TOKEN_BYTES // 2  # within the tool's name
    found = locate(request.request, encoded, decoder(), token)
    assert (found.part, found.name) == ("tool", name[:MAX_NAME])
