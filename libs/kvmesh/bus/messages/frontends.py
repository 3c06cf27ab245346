"""Messages between frontends: last prompts of sessions, and use of the limits of API keys."""

from msgspec import Struct


class SessionQuery(Struct, frozen=True):
    """Query to all frontends for the last prompt of a session; only one that has it replies."""

    model: str
    session: str


class SessionPrompt(Struct, frozen=True):
    """The last prompt of a session: packed uint32 tokens, and its adapter."""

    tokens: bytes
    adapter: str | None = None


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
