"""POST /v1/tokenize and /v1/detokenize, in vLLM's form."""

from array import array
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.frontend.apis.base import CountCall, Headers, RequestStamp, decode, json_encode
from kvmesh.frontend.apis.chat.body import ChatBody, ChatMessage, ToolList
from kvmesh.frontend.apis.chat.body import to_request as chat_request
from kvmesh.frontend.apis.faults import MISSING
from kvmesh.frontend.apis.sampling import SamplingBody, to_sampling
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest


class TokenizeBody(Struct, kw_only=True):
    """Either `prompt`, or `messages` like a chat completion."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: ToolList | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str
    tokens: list[int]


SLICE = 1 << 14  # tokens encoded at a time, since encoding holds the GIL
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenize:
    """The API that returns the tokens of a prompt."""

    name = "tokenize"

    def parse(self, body: bytes, headers: Headers, stamp: RequestStamp) -> CountCall:
        return CountCall(self._request(decode(_tokenize, body)))

    @staticmethod
    def _request(parsed: TokenizeBody) -> GenerateRequest:
        if parsed.messages is not None:
            chat = ChatBody(
                model=parsed.model,
                messages=parsed.messages,
                tools=parsed.tools,
                chat_template_kwargs=parsed.chat_template_kwargs,
                add_generation_prompt=parsed.add_generation_prompt,
                continue_final_message=parsed.continue_final_message,
                reasoning_effort=parsed.reasoning_effort,
            )
            return chat_request(chat, "tokenize")
        if parsed.prompt is None:
            raise InvalidRequest("`prompt` or `messages` is required.", "prompt", MISSING)
        if parsed.add_special_tokens is False:
            reason = "`add_special_tokens`: a prompt always has those of the tokenizer."
            raise InvalidRequest(reason, "add_special_tokens")
        sampling = to_sampling(SamplingBody(), None, None)
        return GenerateRequest(
            id="tokenize", model=parsed.model, sampling=sampling, prompts=[parsed.prompt]
        )

    def answer(self, request: GenerateRequest, prompts: list[bytes], context: int) -> bytes:
        ids = array("I", prompts[0])
        head = json_encode({"count": len(ids), "max_model_len": context})
        slices = (ids[start : start + SLICE].tolist() for start in range(0, len(ids), SLICE))
        tokens = b",".join([json_encode(part)[1:-1] for part in slices])
        return b'%s,"tokens":[%s]}' % (head[:-1], tokens)


def parse_tokens(body: bytes) -> DetokenizeBody:
    """Raises InvalidRequest, also for ids outside of 32 bits."""
    parsed = decode(_detokenize, body)
    if any(not 0 <= token < 1 << 32 for token in parsed.tokens):
        raise InvalidRequest("`tokens`: a token id is negative or too large.", "tokens")
    return parsed
