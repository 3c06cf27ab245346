"""Forms of an answer's messages, of which a template may show one and lose a part of another."""

from typing import Any, NamedTuple

from kvmesh.frontend.conversation import GAP


class AnswerPieces(NamedTuple):
    """The pieces of an answer; `later`: the conversation has a later message of the user."""

    thinking: bool
    text: bool
    calls: bool
    later: bool


class MessageForm(NamedTuple):
    """The form of an answer that has some pieces.

    - `thinking`: with its thinking; `joined`: its text is the end of the thinking.
    - `split`: its calls are a message of their own, behind that of the text.
    - `plain`: its calls are a part of the text, and their results messages of the user.
    """

    thinking: bool = True
    joined: bool = False
    split: bool = False
    plain: bool = False


WHOLE, BARE = MessageForm(), MessageForm(thinking=False)
JOINED, SPLIT = MessageForm(joined=True), MessageForm(split=True)
_SHOWN = (WHOLE, JOINED, SPLIT)
_HIDDEN = (BARE, BARE._replace(split=True), WHOLE._replace(plain=True), BARE._replace(plain=True))


def candidates(pieces: AnswerPieces, *, shown: bool) -> list[MessageForm]:
    """The forms of an answer with these pieces, best first; only those with `shown` thinking."""
    forms = [*_SHOWN, *(() if shown else _HIDDEN)]
    both = pieces.text and pieces.calls
    return [
        form
        for form in forms
        if (pieces.thinking or (form.thinking and not form.joined))
        and (both or not (form.split or form.joined or form.plain))
    ]


def answer_messages(
    form: MessageForm,
    key: str,
    empty: str | None,
    thinking: str,
    text: str,
    calls: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The messages of an answer; `key`: the field of thinking, `empty`: the content of calls."""
    if form.split and text and calls:
        first = answer_messages(form, key, empty, thinking, text, [])
        return first + answer_messages(form, key, empty, "", "", calls)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message |= {"content": text or empty, "tool_calls": calls}
    if thinking and form.thinking:
        if form.joined and text and calls:
            thinking = f"{thinking}{GAP}{text}"
            message["content"] = empty
        message[key] = thinking
    return [message]
