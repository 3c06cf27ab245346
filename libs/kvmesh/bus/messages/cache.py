"""Accounts of prompts' tokens: those reused, those lost and why, and new ones."""

from msgspec import Struct

from kvmesh.bus.messages import kv_events

# Reasons of a loss beside those of removed blocks (`kv_events`). Of a placement elsewhere, the
# reason of `Elsewhere` follows a colon.
ELSEWHERE = "elsewhere"  # another rank held the blocks
UNFINISHED = "unfinished"  # another request was still computing them
NOT_FOUND = "not_found"  # the index named the rank, whose engine did not have them
NEVER_ANNOUNCED = "never_announced"  # the session has computed them, without a KV event
FORGOTTEN = "forgotten"  # the session has computed them; the index does not remember their removal
OTHER_NAMESPACE = "other_namespace"  # the session has computed them with another salt
DIVERGED = "diverged"  # the session's prompt has changed before them
THINKING_NOT_RETURNED = "thinking_not_returned"  # the client left out thinking before them
CALL_REWRITTEN = "call_rewritten"  # the client returned a call before them with other arguments
RERENDERED = "rerendered"  # the template writes what the client returned in another form
UNKNOWN = "unknown"  # the session has computed them; the index did not reply
ELSEWHERE_REASONS = (
    *("load", "room", "busy", "role"),
    *("constraints", "excluded", "draining", "gone"),
)
LOSS_REASONS = frozenset(
    (
        *kv_events.REASONS,
        *(f"{ELSEWHERE}:{reason}" for reason in ELSEWHERE_REASONS),
        *(UNFINISHED, NOT_FOUND, NEVER_ANNOUNCED, FORGOTTEN, OTHER_NAMESPACE, DIVERGED, UNKNOWN),
        *(THINKING_NOT_RETURNED, CALL_REWRITTEN, RERENDERED),
    )
)


class PromptChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first difference of a prompt from its session's earlier one, at index `token`.

    `part` is "system", "tool", "message", "thinking" or "call" (within a message), or "prompt".
    `index` counts such parts from 0, or is that of the message; `name` is the name of the tool, the
    one that is called, or the role of the message. `offset` counts characters from the start of the
    part. `way` is "changed", "inserted", "removed", "not_returned" (thinking of the last answer,
    by the client), "rewritten" (a call of the last answer, by the client), or "rerendered" (the
    same content in another form, by the template). `turns` counts the consecutive turns that
    changed in this part.
    """

    token: int
    part: str
    way: str
    index: int | None = None
    name: str | None = None
    offset: int = 0
    turns: int = 1


class CacheLoss(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tokens` tokens of a prompt, from index `first` on, that were computed again for a reason.

    Of removed blocks, `worker`, `tier` and `time` (Unix seconds) are those of the removal, and
    `request` is the one for whose blocks it was; of a placement elsewhere, `worker` held them.
    """

    first: int
    tokens: int
    reason: str
    worker: str | None = None
    tier: int | None = None
    time: float | None = None
    request: str | None = None


class CacheAccount(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of a prompt: reused + lost + new = `prompt_tokens`.

    The reused ones are those that the session itself has computed (`own`), that a speculative
    prefill has (`ahead`), and that other requests have (`shared`). `possible` are those that an
    endless cache would have held. `previous` is the request of the session that is compared.
    """

    prompt_tokens: int
    own: int = 0
    ahead: int = 0
    shared: int = 0
    new: int = 0
    possible: int = 0
    losses: list[CacheLoss] = []
    previous: str | None = None
    change: PromptChange | None = None

    @property
    def reused(self) -> int:
        return self.own + self.ahead + self.shared

    @property
    def lost(self) -> int:
        return sum(loss.tokens for loss in self.losses)
