"""Whose client calls, where a path is not that of one API."""

from aiohttp import web

from kvmesh.frontend.bodies import ErrorShape
from kvmesh.frontend.surfaces import messages, openai


def shape_for(http: web.Request) -> ErrorShape:
    """The form of errors that the client reads: Anthropic's name their version in a header."""
    if "anthropic-version" in http.headers or http.path.startswith("/v1/messages"):
        return messages.SHAPE
    return openai.SHAPE
