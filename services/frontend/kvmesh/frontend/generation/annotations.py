"""Annotations of a stream: facts about the prompt, as events of their own before the answer."""

from array import array
from collections.abc import Callable
from typing import Any

from kvmesh.frontend.apis.base import json_encode
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

FORMATTED_PROMPT, TOKEN_IDS = "formatted_prompt", "token_ids"


def annotations(prepared: PreparedRequest) -> bytes:
    """The events that the request asks for, each with its value as a comment of JSON.

    An event without data is none for readers that do not expect it.
    """
    made: dict[str, Callable[[], Any]] = {
        FORMATTED_PROMPT: lambda: prepared.text,
        TOKEN_IDS: lambda: array("I", prepared.prompts[0].tokens).tolist(),
    }
    wanted = prepared.request.annotations
    return b"".join(
        b"event: %b\n: %b\n\n" % (name.encode(), json_encode(make()))
        for name, make in made.items()
        if name in wanted
    )
