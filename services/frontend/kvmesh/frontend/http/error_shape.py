"""Whose client calls, where a path is not that of one API."""

from aiohttp import web

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.messages import api as messages
from kvmesh.frontend.http.bodies import ErrorShape


def shape_for(http: web.Request) -> ErrorShape:
    """The form of errors that the client reads: Anthropic's name their version in a header."""
    if "anthropic-version" in http.headers or http.path.startswith("/v1/messages"):
        return messages.SHAPE
    return openai.SHAPE
