"""Compaction: a summary by the model in place of a conversation. Pure."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.apis.sealed_reasoning import Sealed, seal
from kvmesh.frontend.conversation import (
    GAP,
    Block,
    ConversationSummary,
    GenerateRequest,
    Message,
    Text,
    ToolChoice,
)
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

HEAD = "The conversation so far, as a summary:\n\n"
INSTRUCTIONS = (
    "Summarize the conversation up to here, for your own use: it will be replaced by the summary,"
    " and you will go on from there. State the task and its constraints, what has been done and"
    " found, decisions with their reasons, names of files and other exact details that are still"
    " needed, the present state, and the next steps. Call no tool. Write the summary between"
    " <summary> and </summary>."
)
CONTINUE = "continue_final_message"
SUFFIX = "-compaction"  # of the request's id
_SUMMARY = re.compile(r"<summary>(.*?)(?:</summary>|\Z)", re.DOTALL)


class _State(Struct, array_like=True):
    summary: str
    system: tuple[str, ...] = ()
    origin: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0


_state = msgspec.json.Decoder(_State)


def sealed_summary(block: ConversationSummary) -> str:
    """All of a summary as opaque text, which a client returns in place of the conversation."""
    state = _State(block.text, block.system, block.origin)
    return seal(msgspec.json.encode(state).decode())


def opened_summary(text: str | None, sealed: Sealed) -> ConversationSummary | None:
    """The summary given to `sealed_summary`; None for other text. Raises SealedTooLong."""
    try:
        state = _state.decode(sealed.open(text))
    except msgspec.MsgspecError:
        return None
    return ConversationSummary(state.summary, system=state.system, origin=state.origin)


def without_compacted(
    messages: list[Message], memo: TurnMemo = NO_MEMO
) -> tuple[list[Message], ConversationSummary | None]:
    """The messages with their last summary in place of all before it, and that summary.

    Leading system messages stay. The same list if there is no summary.
    """
    if memo.first("compacted", messages, _has_summary) == len(messages):
        return messages, None
    later: list[Message] = []
    for index in range(len(messages) - 1, -1, -1):
        role, blocks = messages[index].role, messages[index].blocks
        for at, block in enumerate(blocks):
            if isinstance(block, ConversationSummary) and block.text:
                if rest := _others(blocks[at + 1 :]):
                    later.append(Message(role, rest))
                system = leading_system(messages[:index])
                return _begun(system, block, later[::-1], memo), block
        if not _has_summary(messages[index]):
            later.append(messages[index])
        elif kept := _others(blocks):
            later.append(Message(role, kept))
    return later[::-1], None


def _has_summary(message: Message) -> bool:
    return ConversationSummary in map(type, message.blocks)


def _others(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if not isinstance(block, ConversationSummary)]


def _begun(
    system: list[Message],
    summary: ConversationSummary,
    later: list[Message],
    memo: TurnMemo = NO_MEMO,
) -> list[Message]:
    """A conversation that begins with a summary; templates want users and answers in turns."""
    shown = {block.text for message in system for block in message.blocks if type(block) is Text}
    carried = [Message("system", [Text(text)]) for text in summary.system if text not in shown]
    first: list[Block] = [Text(HEAD + summary.text, summary.cache)]
    if later and later[0].role == "user":
        first += [Text(GAP), *later.pop(0).blocks]
    return [*system, *carried, memo.same("summary", Message("user", first)), *later]


def leading_system(messages: Sequence[Message]) -> list[Message]:
    """The system messages with which a conversation begins."""
    return [*takewhile(lambda message: message.role == "system", messages)]


def summary_request(request: GenerateRequest) -> GenerateRequest:
    """The request that has the model summarize the conversation of another one."""
    compact = request.context_edits.compact if request.context_edits is not None else None
    wanted = (compact.instructions if compact is not None else None) or INSTRUCTIONS
    messages, last = list(request.messages), request.messages[-1]
    if last.role == "user":
        messages[-1] = Message("user", [*last.blocks, Text(GAP), Text(wanted)])
    else:
        messages.append(Message("user", [Text(wanted)]))
    return replace(
        request,
        id=request.id + SUFFIX,
        sampling=Sampling(
            max_tokens=0, temperature=request.sampling.temperature, top_p=request.sampling.top_p
        ),
        messages=messages,
        tool_choice=ToolChoice("none"),
        guided=None,
        template_args={k: v for k, v in request.template_args.items() if k != CONTINUE},
        thinking=False,
        thinking_budget=None,
        stream=False,
        n=1,
        retention=[],
        decode=None,
        speculative=False,
        extra_fields=frozenset(),
        context_edits=None,
        previous_message=None,
        memo=NO_MEMO,
    )


def summary_of(answer: str) -> str:
    """The summary in an answer to that request: what is marked as such, else all of it."""
    marked = _SUMMARY.search(answer)
    return (marked[1] if marked else answer).strip()


def after_summary(request: GenerateRequest, summary: ConversationSummary) -> list[Message]:
    """The messages of a request whose conversation was summarized."""
    return _begun(leading_system(request.messages), summary, [])
