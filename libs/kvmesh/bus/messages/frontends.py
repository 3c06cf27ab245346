"""Messages of frontends: last prompts of sessions, use of limits of API keys, and kept traces."""

from msgspec import Struct

from kvmesh.bus.messages.cache import PromptChange


class PromptParts(Struct, frozen=True, omit_defaults=True):
    """The parts of a prompt, to compare two prompts without their texts.

    `tools` are the names of the tools that the prompt shows, `tool_hashes` one packed uint32 for
    each. `messages` has two packed uint32 for each message: a hash, whose two lowest bits are the
    role (system, user, assistant, tool), and a hash of its thinking, 0 if it has none.
    """

    tools: list[str] = []
    tool_hashes: bytes = b""
    messages: bytes = b""


class SessionQuery(Struct, frozen=True, omit_defaults=True):
    """Query to all frontends for the last prompt of a session; only one that has it replies.

    With `conversation`, for the last prompt of one of the session's conversations. `request` is the
    request that asks, whose own prompt is no reply. With `parts`, those of the asking prompt, any
    conversation whose prompt is similar is a reply.
    """

    model: str
    session: str
    conversation: int | None = None
    request: str = ""
    parts: PromptParts | None = None


class SessionPrompt(Struct, frozen=True, omit_defaults=True):
    """A prompt of a session: packed uint32 tokens, and its adapter.

    `request` is the request's id, `time` its arrival in Unix seconds, `salt` that of its blocks,
    `output` the tokens generated after it, complete once `done` is set. `conversation` identifies
    the session's conversation; `change` is the prompt's own difference from the one before. `parts`
    is None of a raw prompt.
    """

    tokens: bytes
    adapter: str | None = None
    salt: int = 0
    request: str = ""
    time: float = 0.0
    conversation: int = 0
    output: bytes = b""
    done: bool = False
    change: PromptChange | None = None
    parts: PromptParts | None = None


class KeyUse(Struct, frozen=True, array_like=True):
    """Use of an API key's limits at one frontend. `key` is the hash of its secret.

    `requests` and `tokens` count since the frontend started; `running` is the number of running
    sequences. `owed_requests` and `owed_tokens` are the debts of the key's rate limits, to which
    all frontends contribute.
    """

    key: str
    requests: int
    tokens: int
    running: int
    owed_requests: float = 0.0
    owed_tokens: float = 0.0


class LimitUse(Struct, frozen=True):
    """One frontend's use of limits, sent to all others.

    `age` is the time in seconds for which it has reported. `request_all`: the others reply with
    their own use.
    """

    frontend: str
    uses: list[KeyUse] = []
    age: float = 0.0
    request_all: bool = False


class KeepTraces(Struct, frozen=True, array_like=True):
    """A frontend's report that unsampled traces are kept: processes export their spans of them."""

    traces: list[str]
