"""Chooses the error shape of a request by its client."""

from aiohttp import web

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import ErrorShape
from kvmesh.frontend.apis.messages import api as messages
from kvmesh.frontend.apis.pooling import rerank

ANTHROPIC = "/v1/messages"
COHERE = "/v2/rerank"
OPENAI = ("/v1/chat/", "/v1/completions", "/v1/responses")


def shape_for(http: web.Request) -> ErrorShape:
    """The shape of the path's API; elsewhere Anthropic's if a header names a version of its API."""
    if http.path.startswith(ANTHROPIC):
        return messages.SHAPE
    if http.path == COHERE:
        return rerank.COHERE
    if "anthropic-version" in http.headers and not http.path.startswith(OPENAI):
        return messages.SHAPE
    return openai.SHAPE
