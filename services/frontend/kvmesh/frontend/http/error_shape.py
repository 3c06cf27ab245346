"""Chooses the error shape of a request by its client."""

from aiohttp import web

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import ErrorShape
from kvmesh.frontend.apis.messages import api as messages


def shape_for(http: web.Request) -> ErrorShape:
    """Anthropic's shape if a header names a version of its API, or by path; else OpenAI's."""
    if "anthropic-version" in http.headers or http.path.startswith("/v1/messages"):
        return messages.SHAPE
    return openai.SHAPE
