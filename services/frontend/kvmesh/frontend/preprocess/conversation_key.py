"""The key of a conversation, by which the conversations of one session are told apart. Pure.

Harnesses send side requests (titles, hooks, summaries, subagents) under the session of the main
conversation. They differ from it in their tools, their system text or their first message, none of
which a turn of a conversation changes. Frontends compute the same key without asking each other;
a session that its client does not name is named by it.
"""

from collections.abc import Iterator
from itertools import takewhile

from kvmesh._native import xxh3
from kvmesh.frontend.apis.agent_kinds import OTHER, is_harness
from kvmesh.frontend.conversation import ConversationSummary, GenerateRequest, Text
from kvmesh.frontend.dialects.templates.chat_messages import without_billing
from kvmesh.frontend.namespaces import inferred

HALF = 32
MASK = (1 << HALF) - 1
SAMPLE = 1024  # characters at each end of a system text, which tell agents apart


def conversation_key(request: GenerateRequest) -> int:
    """64 bits: above those of tools and system text, below those of the first user message.

    0 for a request without messages. Deferred tools do not count: clients reorder them.
    """
    if not request.messages:
        return 0
    return agent_key(request) << HALF | first_message_key(request)


def conversation_name(conversation: int) -> str:
    """The short name of a conversation by its key; empty if that is unknown."""
    return f"{conversation >> HALF ^ conversation & MASK:08x}" if conversation else ""


def inferred_session(request: GenerateRequest) -> str | None:
    """The name of a session that its client does not name, such as `qwen-code 3fa2b1c0`.

    None of a request that has neither tools nor an earlier turn, and comes from no known harness:
    most such requests are the only ones of their conversation, and a session costs the engines
    memory.
    """
    conversation = request.hints.conversation
    if not conversation or not (request.tools or request.continues or is_harness(request.agent)):
        return None
    name = f"{request.agent or OTHER} {conversation_name(conversation)}"
    return inferred(request.cache_salt, name)


def sticky_key(request: GenerateRequest) -> str:
    """The text by which a request's session keeps its model: the session, else the conversation.

    A raw prompt without a session has none to keep.
    """
    session = request.hints.session
    if session:
        return f"{request.cache_salt}\0{session}"
    conversation = conversation_key(request)
    return f"{request.cache_salt}\0{conversation}" if conversation else request.id


def agent_key(request: GenerateRequest) -> int:
    """32 bits that identify the tools and the leading system text of a request."""
    return _hash("\0".join(_agent_texts(request)))


def first_message_key(request: GenerateRequest) -> int:
    """32 bits that identify the last block of the first user message; 0 if it is no text.

    A summary does not change the key of its conversation: engines find by it what was left.
    """
    if request.origin:
        return request.origin
    for message in request.messages:
        if message.blocks and isinstance(summary := message.blocks[0], ConversationSummary):
            return summary.origin
        if message.blocks and message.role == "user":
            last = message.blocks[-1]
            return _hash(last.text) if isinstance(last, Text) else 0
    return 0


def _agent_texts(request: GenerateRequest) -> Iterator[str]:
    for tool in request.tools:
        if not tool.deferred:
            yield tool.name
            yield str(len(tool.description))
    for message in takewhile(lambda m: m.role == "system", request.messages):
        for block in without_billing(message):
            if isinstance(block, Text):
                yield _sample(block.text)


def _sample(text: str) -> str:
    """A text that differs for texts which are not made from one another by a few edits."""
    return text if len(text) <= 2 * SAMPLE else f"{text[:SAMPLE]}{len(text)}{text[-SAMPLE:]}"


def _hash(text: str) -> int:
    return xxh3(text.encode("utf-8", "surrogatepass")) & MASK
