"""Annotations of a stream: facts about the prompt, as events of their own before the answer."""

from array import array
from collections.abc import Callable

from kvmesh.frontend.apis.base import as_json, json_encode
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

FORMATTED_PROMPT, TOKEN_IDS = "formatted_prompt", "token_ids"


def annotations(prepared: PreparedRequest) -> bytes:
    """The events that the request asks for, each with its text as a comment, a string of JSON.

    An event without data is none for readers that do not expect it.
    """
    made: dict[str, Callable[[], str]] = {
        FORMATTED_PROMPT: lambda: prepared.text,
        TOKEN_IDS: lambda: as_json(array("I", prepared.prompts[0].tokens).tolist()),
    }
    wanted = prepared.request.annotations
    return b"".join(
        b"event: %b\n: %b\n\n" % (name.encode(), json_encode(make()))
        for name, make in made.items()
        if name in wanted
    )
