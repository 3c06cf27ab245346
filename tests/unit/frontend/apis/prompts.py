"""The prompt that the demo model gets from a body of any API."""

import asyncio
import json
from functools import cache
from typing import Any

from support.stamp import STAMP

from kvmesh.bus.messages import ModelCard
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor

APIS: dict[str, Api] = {api.name: api for api in (Chat(), Completions(), Messages(), Responses())}
CARD = ModelCard(name="m", context=1 << 16, block_size=16, files="demo", structural_tags=True)


@cache
def model() -> ServedModel:
    files = {file.name: file.read_bytes() for file in model_dir().iterdir() if file.is_file()}
    return ServedModel(CARD, Dialect(CARD, files), 0)


def request_of(api: str, sent: dict[str, Any] | bytes) -> GenerateRequest:
    """The request of a body that lists what it ignores."""
    if isinstance(sent, dict):
        sent = json.dumps({"model": "m", "nvext": {"extra_fields": ["ignored"]}, **sent}).encode()
    return APIS[api].parse(sent, {}, STAMP).request


def prepared(request: GenerateRequest) -> PreparedRequest:
    preprocessor = Preprocessor(1 << 20, TenantNamespaces())
    return asyncio.run(preprocessor.prepare(request, model(), None))


def prompt_of(api: str, sent: dict[str, Any] | bytes) -> str:
    encoded = prepared(request_of(api, sent)).encoded
    assert encoded is not None
    return encoded.text


def conversation(api: str, *messages: dict[str, Any]) -> dict[str, Any]:
    """A body with these messages."""
    if api == "messages":
        return {"max_tokens": 9, "messages": list(messages)}
    return {"input" if api == "responses" else "messages": list(messages)}
