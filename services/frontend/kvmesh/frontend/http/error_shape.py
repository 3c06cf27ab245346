"""Chooses the error shape of a request by its client."""

from aiohttp import web

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import ErrorShape
from kvmesh.frontend.apis.messages import api as messages

ANTHROPIC = "/v1/messages"
OPENAI = ("/v1/chat/", "/v1/completions", "/v1/responses")


def shape_for(http: web.Request) -> ErrorShape:
    """The shape of the path's API; elsewhere Anthropic's if a header names a version of its API."""
    if http.path.startswith(ANTHROPIC):
        return messages.SHAPE
    if "anthropic-version" in http.headers and not http.path.startswith(OPENAI):
        return messages.SHAPE
    return openai.SHAPE
