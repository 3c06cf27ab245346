"""Compaction: a summary by the model in place of a conversation, and its blocks. Pure."""

import re
from collections.abc import Sequence

from msgspec.structs import replace

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.conversation import (
    GAP,
    Block,
    ConversationSummary,
    GenerateRequest,
    Message,
    Text,
    ToolChoice,
)
from kvmesh.frontend.turn_memo import NO_MEMO

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


def without_compacted(messages: Sequence[Message]) -> list[Message]:
    """The messages with the last summary in place of all before it, but for system messages."""
    found = list(messages)
    for index in range(len(found) - 1, -1, -1):
        blocks = found[index].blocks
        places = [at for at, block in enumerate(blocks) if isinstance(block, ConversationSummary)]
        for at in reversed(places):
            block = blocks[at]
            if isinstance(block, ConversationSummary) and block.text:
                kept = _others(blocks[at + 1 :])
                rest = [Message(found[index].role, kept)] if kept else []
                later = [*rest, *found[index + 1 :]]
                return _begun([*_system(found)], block, later)
        if places:
            kept = _others(blocks)
            found[index : index + 1] = [Message(found[index].role, kept)] if kept else []
    return found


def _others(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if not isinstance(block, ConversationSummary)]


def _begun(
    system: list[Message], block: ConversationSummary, later: list[Message]
) -> list[Message]:
    """A conversation that begins with a summary; templates want users and answers in turns."""
    text = Text(HEAD + block.text, block.cache)
    if later and later[0].role == "user":
        first = Message("user", [text, Text(GAP), *later[0].blocks])
        return [*system, first, *later[1:]]
    return [*system, Message("user", [text]), *later]


def _system(messages: Sequence[Message]) -> list[Message]:
    return [messages[0]] if messages and messages[0].role == "system" else []


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


def after_summary(request: GenerateRequest, summary: str) -> list[Message]:
    """The messages of a request whose conversation was summarized."""
    return _begun(_system(request.messages), ConversationSummary(summary), [])
