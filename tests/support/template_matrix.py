"""Conversations as clients send them, and how kvmesh adapts them to what a template can show.

Each adaptation is a change of the messages after which Transformers writes, with the same template,
the prompt that kvmesh writes without it.
"""

import datetime
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.plain_tools import calls_text, instructions, plain_parser
from kvmesh.frontend.dialects.templates import sandbox
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate
from support.stamp import STAMP

Entry = dict[str, Any]
Entries = list[Entry]
CONFIG = b'{"bos_token": "<s>", "eos_token": "</s>"}'
MOST_SHOWN = 3
MOST_TOGETHER = 4  # adaptations of one conversation, beyond those of every conversation
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks it up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "The question."}},
            "required": ["q"],
        },
    },
}
# Templates name the switch in either way; DeepSeek's are the ones with the second.
KWARGS: list[Entry] = [
    {},
    *({"enable_thinking": thinks, "thinking": thinks} for thinks in (True, False)),
]
# Switches that kvmesh sets, so that earlier thinking stays where a template can show it.
KEPT_THINKING = {"preserve_thinking": True, "clear_thinking": False}

logging.getLogger("transformers").setLevel(logging.ERROR)
_tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), bos_token="<s>", eos_token="</s>"
)


class Conversation(NamedTuple):
    """A conversation, and the pieces that its prompt must show, in order.

    Of `results`, each comes behind its call.
    """

    messages: Entries
    pieces: list[str]


# --- conversations -----------------------------------------------------------------------------


def conversations() -> dict[str, Conversation]:
    """The conversations of the matrix, by name."""
    found = {
        "one question": [_user("ask1")],
        "several turns": [_system("rule1"), _user("ask1"), _said("say1"), _user("ask2")],
        "thinking in an earlier turn": [_user("ask1"), _said("say1", "think1"), _user("ask2")],
        "system later": [
            *(_system("rule1"), _user("ask1"), _said("say1"), _system("rule2"), _user("ask2"))
        ],
        "system last": [_user("ask1"), _said("say1"), _user("ask2"), _system("rule2")],
        "two systems": [_system("rule1"), _system("rule2"), _user("ask1")],
        "developer": [{"role": "developer", "content": "rule1"}, _user("ask1")],
        "system alone": [_system("rule1")],
        "users in a row": [_user("ask1"), _user("ask2"), _said("say1"), _user("ask3")],
        "answers in a row": [_user("ask1"), _said("say1"), _said("say2"), _user("ask2")],
        "parts": [{"role": "user", "content": [_part("ask1"), _part("ask2")]}],
        "empty": [_system(""), _user("ask1"), _said(""), _user("ask2")],
        "names": [_user("ask1") | {"name": "ann"}, _said("say1"), _user("ask2") | {"name": "bob"}],
        "system in a loop": [
            *(_user("ask1"), _calls("", "", 1), _result(1), _system("rule2")),
        ],
    }
    for shape, text, thinking, number in (
        ("call", "", "", 1),
        ("text and call", "say1", "", 1),
        ("thinking and call", "", "think1", 1),
        ("thinking, text and call", "say1", "think1", 1),
        ("thinking, text and calls", "say1", "think1", 2),
    ):
        answer = _calls(text, thinking, *range(1, number + 1))
        results = [_result(index + 1) for index in range(number)]
        step = [_user("ask1"), answer, *results]
        again = [_calls("say9", "think9", 9), _result(9)]
        found[f"{shape}, in a loop"] = step
        found[f"{shape}, in a long loop"] = [_system("rule1"), *step, *again]
        found[f"{shape}, earlier"] = [*step, _said("say8", "think8"), _user("ask2")]
        found[f"{shape}, a user after results"] = [*step, _user("ask2")]
    return {name: Conversation(each, [*_pieces(each)]) for name, each in found.items()}


def _user(text: str) -> Entry:
    return {"role": "user", "content": text}


def _system(text: str) -> Entry:
    return {"role": "system", "content": text}


def _said(text: str, thinking: str = "") -> Entry:
    answer = {"role": "assistant", "content": text}
    return answer | ({"reasoning_content": thinking} if thinking else {})


def _calls(text: str, thinking: str, *numbers: int) -> Entry:
    calls = [
        {
            "id": f"id{number}",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"q": f"value{number}"})},
        }
        for number in numbers
    ]
    return _said(text, thinking) | {"tool_calls": calls}


def _result(number: int) -> Entry:
    return {"role": "tool", "tool_call_id": f"id{number}", "content": f"result{number}"}


def _part(text: str) -> Entry:
    return {"type": "text", "text": text}


def _pieces(messages: Entries) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        yield from (p["text"] for p in content) if isinstance(content, list) else [content]
        for call in message.get("tool_calls", []):
            yield json.loads(call["function"]["arguments"])["q"]


def lost(prompt: str, conversation: Conversation) -> list[str]:
    """The pieces that the prompt does not show, or not in order.

    A template with one call per message shows each call's result before the next call.
    """
    orders = [conversation.pieces]
    pieces = conversation.pieces
    if "value2" in pieces:
        at = pieces.index("value2")
        orders.append([*pieces[:at], "result1", "value2", *pieces[at + 2 :]])
    return min((_missing(prompt, order) for order in orders), key=len)


def _missing(prompt: str, pieces: list[str]) -> list[str]:
    pos, missing = 0, []
    for piece in pieces:
        found = prompt.find(piece, pos)
        if found < 0:
            missing.append(piece)
        else:
            pos = found + len(piece)
    return missing


# --- renderings --------------------------------------------------------------------------------


@lru_cache(1)
def loaded(source: str) -> ChatTemplate:
    return ChatTemplate({"chat_template.jinja": source.encode(), "tokenizer_config.json": CONFIG})


def request(messages: Entries, tools: Entries | None, kwargs: Entry) -> GenerateRequest:
    """The request of a body of the chat API."""
    body = {"model": "m", "messages": messages, "chat_template_kwargs": kwargs}
    if tools:
        body["tools"] = tools
    return Chat().parse(json.dumps(body).encode(), {}, STAMP).request


def ours(source: str, messages: Entries, tools: Entries | None, kwargs: Entry) -> str | None:
    """The prompt of kvmesh; None if the template refuses the conversation."""
    try:
        return loaded(source).render(request(messages, tools, kwargs), datetime.date.today())
    except TemplateError:
        return None


def theirs(source: str, messages: Entries, tools: Entries | None, kwargs: Entry) -> str | None:
    """The prompt of Transformers; None if the template fails with the conversation.

    Since its release 5.24 it drops content that is null, without which some templates show no call.
    """
    template = _compile_jinja_template(source)  # the same one for each rendering
    template.globals["strftime_now"] = sandbox.strftime(datetime.date.today())  # not the second
    try:
        if any(message["content"] is None for message in messages):
            fixed = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
            return str(template.render(messages=messages, tools=tools, **fixed, **kwargs))
        shown: str = _tokenizer.apply_chat_template(
            deepcopy(messages),
            tools=tools,
            chat_template=source,
            add_generation_prompt=True,
            tokenize=False,
            **kwargs,
        )
        return shown
    except Exception:  # templates raise any exception
        return None


# --- adaptations -------------------------------------------------------------------------------


class Adaptation(NamedTuple):
    """A change of a conversation, and its reason. `change` gets the template's text, too."""

    name: str
    reason: str
    change: Callable[[Entries, str], Entries]


def standard(messages: Entries, source: str) -> Entries:
    """The changes that every conversation gets: the wire format leaves their values open.

    Developer messages are system messages, text parts are one text, and empty messages of the
    system or the model are left out. Ids of calls are their numbers, so that they do not differ
    between conversations; results have their functions' names, as some templates need. Names of
    users are in their texts, since templates do not show them.
    """
    kimi = "<|tool_calls_section_begin|>" in source
    ids: dict[str, str] = {}
    changed = []
    for message in deepcopy(messages):
        if (name := message.pop("name", None)) is not None:
            message["content"] = f"{name}: {message['content']}"
        if message["role"] == "developer":
            message["role"] = "system"
        if isinstance(message["content"], list):
            message["content"] = "\n\n".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls", []):
            number = len(ids)
            ids[call["id"]] = f"functions.look:{number}" if kimi else f"call{number:05d}"
            call["id"] = ids[call["id"]]
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message["role"] == "tool":
            message |= {"tool_call_id": ids[message["tool_call_id"]], "name": "look"}
        if message["content"] or message["role"] == "user" or message.get("tool_calls"):
            changed.append(message)
    return changed


def _each(change: Callable[[Entry], Entries]) -> Callable[[Entries, str], Entries]:
    return lambda messages, _: [new for message in messages for new in change(message)]


def _text_arguments(message: Entry) -> Entries:
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return [message]


def _no_content(message: Entry) -> Entries:
    empty = "tool_calls" in message and not message["content"]
    return [message | {"content": None} if empty else message]


def _content_parts(message: Entry) -> Entries:
    return [message | {"content": [_part(message["content"] or "")]}]


def _renamed(name: str) -> Callable[[Entry], Entries]:
    def change(message: Entry) -> Entries:
        if "reasoning_content" in message:
            message[name] = message.pop("reasoning_content")
        return [message]

    return change


def _without_thinking(message: Entry) -> Entries:
    return [{key: value for key, value in message.items() if key != "reasoning_content"}]


def _text_in_thinking(message: Entry) -> Entries:
    if "tool_calls" in message and message["content"] and "reasoning_content" in message:
        message["reasoning_content"] += f"\n\n{message['content']}"
        message["content"] = ""
    return [message]


def _calls_apart(message: Entry) -> Entries:
    if "tool_calls" not in message or not message["content"]:
        return [message]
    calls = {"role": "assistant", "content": "", "tool_calls": message.pop("tool_calls")}
    return [message, calls]


def _earlier_calls_apart(messages: Entries, _: str) -> Entries:
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last = max(users, default=0)
    new = [_calls_apart(m) if index < last else [m] for index, m in enumerate(messages)]
    return [*itertools.chain.from_iterable(new)]


def _one_call_each(messages: Entries, _: str) -> Entries:
    results = {message.get("tool_call_id"): message for message in messages}
    changed: Entries = []
    for message in messages:
        calls = message.get("tool_calls", [])
        for number, call in enumerate(calls):
            holder = message if number == 0 else {"role": "assistant", "content": ""}
            changed += [holder | {"tool_calls": [call]}, results[call["id"]]]
        if not calls and message["role"] != "tool":
            changed.append(message)
    return changed


def _all_calls_as_text(messages: Entries, source: str) -> Entries:
    return _as_text(messages, source, lambda _: True)


def _spoken_calls_as_text(messages: Entries, source: str) -> Entries:
    return _as_text(messages, source, lambda message: bool(message["content"]))


def _as_text(messages: Entries, source: str, chosen: Callable[[Entry], bool]) -> Entries:
    plain: set[str] = set()
    changed = []
    for message in messages:
        if "tool_calls" in message and chosen(message):
            calls = message.pop("tool_calls")
            plain |= {call["id"] for call in calls}
            written = calls_text(calls, plain_parser(source))
            message["content"] = "\n".join(filter(None, [message["content"], written]))
        elif message.get("tool_call_id") in plain:
            message = _user(f"<tool_response>\n{message['content']}\n</tool_response>")
        changed.append(message)
    return changed


def _leading_system_joined(messages: Entries, _: str) -> Entries:
    lead = [*itertools.takewhile(lambda message: message["role"] == "system", messages)]
    if len(lead) < 2:
        return messages
    return [_system("\n\n".join(m["content"] for m in lead)), *messages[len(lead) :]]


def _late_system(messages: Entries, _: str) -> Entries:
    return [
        message | {"role": "user"} if index and message["role"] == "system" else message
        for index, message in enumerate(messages)
    ]


def _system_as_user(messages: Entries, _: str) -> Entries:
    """The first one is in the message of the user that follows it."""
    changed = [m | {"role": "user"} if m["role"] == "system" else m for m in messages]
    if [m["role"] for m in messages[:2]] == ["system", "user"]:
        changed[:2] = _joined("user")(changed[:2], "")
    return changed


def _joined(role: str) -> Callable[[Entries, str], Entries]:
    def change(messages: Entries, _: str) -> Entries:
        changed: Entries = []
        for message in messages:
            before = changed[-1] if changed else {}
            if message["role"] == role == before.get("role") and "tool_calls" not in before:
                content = f"{before['content']}\n\n{message['content']}"
                changed[-1] = {**before, **message, "content": content}
            else:
                changed.append(message)
        return changed

    return change


def _result_and_user(messages: Entries, _: str) -> Entries:
    changed: Entries = []
    for message in messages:
        if message["role"] == "user" and changed and changed[-1]["role"] == "tool":
            content = f"{changed[-1]['content']}\n\n{message['content']}"
            changed[-1] = changed[-1] | {"content": content}
        else:
            changed.append(message)
    return changed


def _with_instructions(role: str) -> Callable[[Entries, str], Entries]:
    def change(messages: Entries, source: str) -> Entries:
        text = instructions([TOOL], plain_parser(source))
        if messages and messages[0]["role"] == role:
            return [
                messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"},
                *messages[1:],
            ]
        return [{"role": role, "content": text}, *messages]

    return change


# In the order in which they are made.
ADAPTATIONS = [
    Adaptation(
        "joined system messages",
        "APIs split a system prompt in different ways",
        _leading_system_joined,
    ),
    Adaptation("joined answers", "APIs split an answer in different ways", _joined("assistant")),
    Adaptation(
        "late system messages",
        "the template has them at the start only, or loses them",
        _late_system,
    ),
    Adaptation(
        "system messages of the user", "the template shows none at the start", _system_as_user
    ),
    Adaptation("dropped thinking", "text or calls would be lost with it", _each(_without_thinking)),
    Adaptation(
        "text in thinking",
        "the template shows thinking or text beside calls, not both",
        _each(_text_in_thinking),
    ),
    Adaptation(
        "all calls as text", "the template shows none, or fails with them", _all_calls_as_text
    ),
    Adaptation(
        "calls beside text as text",
        "the template shows text or calls, and no two answers in a row",
        _spoken_calls_as_text,
    ),
    Adaptation("calls apart from text", "the template shows text or calls", _each(_calls_apart)),
    Adaptation(
        "earlier calls apart from text",
        "the template shows text beside calls in the last turn only",
        _earlier_calls_apart,
    ),
    Adaptation("one call each", "the template shows one call in a message", _one_call_each),
    Adaptation(
        "user's text in the result",
        "the template accepts no message of the user after a result",
        _result_and_user,
    ),
    Adaptation("joined users", "the template accepts no two in a row", _joined("user")),
    Adaptation(
        "tool instructions",
        "the template shows no tools",
        _with_instructions("system"),
    ),
    Adaptation(
        "tool instructions of the user",
        "the template shows neither tools nor a system message",
        _with_instructions("user"),
    ),
    Adaptation("thinking", "the template's field of thinking", _each(_renamed("thinking"))),
    Adaptation("reasoning", "the template's field of thinking", _each(_renamed("reasoning"))),
    Adaptation(
        "arguments as text",
        "the template takes them so, as the wire format",
        _each(_text_arguments),
    ),
    Adaptation("no content", "the template shows calls only without", _each(_no_content)),
    Adaptation("parts", "the template takes content as parts", _each(_content_parts)),
]


def _changed(messages: Entries, chosen: tuple[Adaptation, ...], source: str) -> Entries | None:
    """The messages with the adaptations; None if one of them changes nothing."""
    for adaptation in chosen:
        before = messages
        messages = adaptation.change(deepcopy(before), source)
        if messages == before:
            return None
    return messages


class Comparison:
    """Compares the prompts of one template; remembers which adaptations it needs."""

    def __init__(self, source: str) -> None:
        self._source = source
        question: Entries = [{"role": "user", "content": "?"}]
        self._takes_tools = theirs(source, question, [TOOL], {}) is not None
        self._known: list[tuple[Adaptation, ...]] = [()]

    def difference(
        self, conversation: Conversation, tools: Entries | None, kwargs: Entry
    ) -> str | None:
        """The fault of kvmesh's prompt; None if there is none."""
        messages, source = conversation.messages, self._source
        shown_tools = tools if tools is None or self._takes_tools else None
        prompt = ours(source, messages, tools, kwargs)
        if prompt is None:
            shown = theirs(source, messages, tools, kwargs)
            return None if shown is None else f"only Transformers renders it: {shown}"
        if missing := lost(prompt, conversation):
            return f"{missing} are lost in {prompt}"
        if prompt == theirs(source, messages, tools, kwargs):
            return None
        plain = standard(messages, source)
        for chosen in self._candidates():
            changed = _changed(plain, chosen, source)
            if changed is None:
                continue
            if theirs(source, changed, shown_tools, KEPT_THINKING | kwargs) == prompt:
                if chosen not in self._known:
                    self._known.insert(0, chosen)
                return None
        return f"no adaptation explains {prompt}"

    def _candidates(self) -> Iterator[tuple[Adaptation, ...]]:
        yield from self._known
        for count in range(1, MOST_TOGETHER + 1):
            yield from itertools.combinations(ADAPTATIONS, count)


def differences(source: str) -> dict[str, str]:
    """The faults of kvmesh's prompts of a template, by case; the first MOST_SHOWN faults."""
    comparison, found = Comparison(source), {}
    cases = itertools.product(conversations().items(), KWARGS, (None, [TOOL]))
    for (name, conversation), kwargs, tools in cases:
        wrong = comparison.difference(conversation, tools, kwargs)
        if wrong is not None:
            found[f"{name}, {kwargs}, {'tools' if tools else 'no tools'}"] = wrong
        if len(found) == MOST_SHOWN:
            break
    return found
