"""POST /v1/tokenize and /v1/detokenize, in the form that vLLM gave them."""

from array import array
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import Headers, decode, json_encode
from kvmesh.frontend.apis.chat.body import ChatBody, ChatMessage, ChatToolBody
from kvmesh.frontend.apis.chat.body import to_request as chat_request
from kvmesh.frontend.apis.sampling import SamplingBody, to_sampling
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest


class TokenizeBody(Struct, kw_only=True):
    """Either `prompt`, or what a chat completion would have."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ChatToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str
    tokens: list[int]


SLICE = 1 << 14  # tokens that are written at once, which keeps all other threads waiting
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenize:
    """The counting surface that also shows the tokens."""

    name = "tokenize"

    def parse(self, body: bytes, headers: Headers) -> GenerateRequest:
        parsed = decode(_tokenize, body)
        if parsed.messages is not None:
            chat = ChatBody(
                model=parsed.model,
                messages=parsed.messages,
                tools=parsed.tools,
                chat_template_kwargs=parsed.chat_template_kwargs,
            )
            return chat_request(chat, "tokenize")
        if parsed.prompt is None:
            raise InvalidRequest("One of `prompt` and `messages` is needed.", "prompt")
        sampling = to_sampling(SamplingBody(), None, None)
        return GenerateRequest(
            id="tokenize", model=parsed.model, sampling=sampling, prompts=[parsed.prompt]
        )

    def error(self, error: ApiError) -> tuple[int, bytes]:
        return openai.error_body(error)

    def answer(self, prompts: list[bytes], context: int) -> bytes:
        ids = array("I", prompts[0])
        head = json_encode({"count": len(ids), "max_model_len": context})
        slices = (ids[place : place + SLICE].tolist() for place in range(0, len(ids), SLICE))
        tokens = b",".join([json_encode(part)[1:-1] for part in slices])
        return b'%s,"tokens":[%s]}' % (head[:-1], tokens)


def parse_tokens(body: bytes) -> DetokenizeBody:
    """Raises InvalidRequest for ids that no tokenizer has."""
    parsed = decode(_detokenize, body)
    if any(not 0 <= token < 1 << 32 for token in parsed.tokens):
        raise InvalidRequest("`tokens`: a token id is negative or too large.", "tokens")
    return parsed
