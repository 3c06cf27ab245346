"""Messages between frontends: last prompts of sessions, and use of the limits of API keys."""

from msgspec import Struct


class SessionQuery(Struct, frozen=True):
    """To all frontends: the last prompt of a session, from whoever knows it; others say nothing."""

    model: str
    session: str


class SessionPrompt(Struct, frozen=True):
    """The last prompt of a session: packed uint32 tokens, and the adapter that it was for."""

    tokens: bytes
    adapter: str | None = None


class KeyUse(Struct, frozen=True, array_like=True):
    """The use of an API key's limits. `key` is the hash of its secret.

    `requests` and `tokens` were taken by one frontend since it began, `running` are its sequences
    now. What is owed has still to come in at the key's rates, whoever took it.
    """

    key: str
    requests: int
    tokens: int
    running: int
    owed_requests: float = 0.0
    owed_tokens: float = 0.0


class LimitUse(Struct, frozen=True):
    """One frontend to all others: what it lets its callers use, and for how long it has told so.

    `asks` them to say all in turn.
    """

    frontend: str
    uses: list[KeyUse] = []
    age: float = 0.0
    asks: bool = False
