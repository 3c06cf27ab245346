"""POST /v1/tokenize and /v1/detokenize, in vLLM's form."""

from array import array

import msgspec
from msgspec import Struct

from kvmesh.frontend.apis.base import CountCall, Headers, RequestStamp, decode, json_encode
from kvmesh.frontend.apis.chat.body import ChatBody, ChatMessage
from kvmesh.frontend.apis.chat.body import to_request as chat_request
from kvmesh.frontend.apis.faults import MISSING
from kvmesh.frontend.apis.sampling import check_special_tokens, to_sampling
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest


class TokenizeBody(ChatBody, kw_only=True):
    """Either `prompt`, or `messages` with all other fields of a chat completion."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None  # type: ignore[assignment]  # or `prompt` is there
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str
    tokens: list[int]


SLICE = 1 << 14  # tokens encoded at a time, since encoding holds the GIL
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenize:
    """The API that returns the tokens of a prompt."""

    name = "tokenize"

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> CountCall:
        return CountCall(self._request(decode(_tokenize, body)))

    @staticmethod
    def _request(parsed: TokenizeBody) -> GenerateRequest:
        if parsed.return_token_strs:
            reason = "`return_token_strs` is not supported; /v1/detokenize has texts of tokens."
            raise InvalidRequest(reason, "return_token_strs")
        if parsed.messages is not None:
            if parsed.prompt is not None:
                raise InvalidRequest("`prompt` and `messages` exclude each other.", "prompt")
            return chat_request(parsed, "tokenize", TurnBody(b""))
        if parsed.prompt is None:
            raise InvalidRequest("`prompt` or `messages` is required.", "prompt", MISSING)
        check_special_tokens(parsed.add_special_tokens)
        sampling = to_sampling(parsed, None, None)
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
    """Raises InvalidRequest."""
    return decode(_detokenize, body)
