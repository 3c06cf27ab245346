"""The one internal form of a request and of an answer, whichever API they came or leave by.

Content is a list of typed blocks in generation order, so that interleaved thinking and tool
calls survive a round trip through any surface.
"""

from itertools import groupby
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from kvmesh.bus.messages import Guided, Hints, Placement, Retain, Sampling


class CacheControl(Struct, frozen=True):
    """Keep the prompt up to this point cached for `ttl_s` seconds."""

    ttl_s: float


class Text(Struct, frozen=True):
    text: str
    cache: CacheControl | None = None


class Thinking(Struct, frozen=True):
    """A reasoning span; `signature` is opaque and goes back to the client as it came."""

    text: str
    signature: str = ""


class Image(Struct, frozen=True):
    """A reference to an image: an http(s) or data URL."""

    url: str
    cache: CacheControl | None = None


class ToolCall(Struct, frozen=True):
    """`arguments` is JSON text for functions and free text for custom (grammar) tools."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    custom: bool = False
    cache: CacheControl | None = None


class ToolResult(Struct, frozen=True):
    """`references` names deferred tools that this result makes known."""

    call_id: str
    content: "list[Text | Image]"
    is_error: bool = False
    references: list[str] = []
    cache: CacheControl | None = None


class ToolNotice(Struct, frozen=True):
    """The tool called `name` can be used from here on, or no longer."""

    name: str
    removed: bool = False


Block: TypeAlias = Text | Thinking | Image | ToolCall | ToolResult | ToolNotice


class Message(Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    blocks: list[Block]


class Tool(Struct, frozen=True):
    """`parameters` is a JSON schema. A deferred tool is rendered only where it is referenced.

    `grammar`, of a custom tool, is in Lark's syntax, or with `regex` a regular expression.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    namespace: str | None = None
    strict: bool = False
    custom: bool = False
    grammar: str | None = None
    regex: bool = False
    deferred: bool = False
    cache: CacheControl | None = None


class ToolChoice(Struct, frozen=True):
    """`named` requires the tool called `name`."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


class GenerateRequest(Struct, kw_only=True):
    """One request, ready for the chat template. `prompts` replaces `messages` for completions:

    each prompt is text or token ids. `sampling.max_tokens` of 0 means "as much as fits".
    `retention` and `decode` are what the caller asked for tokens of the prompt and the answer,
    `keep_s` how long to keep the whole prompt; `speculative`: compute ahead what comes after it.
    `size` is that of the body in bytes; requests of one `owner` wait for each other where work is
    shared out.
    """

    id: str
    model: str
    sampling: Sampling
    messages: list[Message] = []
    prompts: list[str | list[int]] = []
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    guided: Guided | None = None
    template_args: dict[str, Any] = {}
    thinking: bool | None = None
    stream: bool = False
    n: int = 1
    echo: bool = False
    hints: Hints = Hints()
    placement: Placement = Placement()
    policy: str | None = None
    overrides: dict[str, float] = {}
    cache_salt: str = ""
    retention: list[Retain] = []
    decode: Retain | None = None
    keep_s: float | None = None
    speculative: bool = False
    adapter: str | None = None
    extra_fields: frozenset[str] = frozenset()
    ignored: list[str] = []
    size: int = 0
    owner: str = ""

    @property
    def turn(self) -> int:
        """How many answers come before this one: runs of assistant messages."""
        runs = groupby(message.role for message in self.messages)
        return sum(role == "assistant" for role, _ in runs)

    @property
    def steers(self) -> bool:
        """Whether it tells the router how to choose, or whom."""
        place = self.placement
        named = place.instance is not None or place.rank is not None
        return bool(named or place.exclude or place.allow or self.policy or self.overrides)

    def keep(self, ttl_s: float | None) -> None:
        """Keep the whole prompt for at least this long, if it is said how long."""
        if ttl_s is not None:
            self.keep_s = max(ttl_s, self.keep_s or 0.0)


# --- the answer, as a stream of events ---------------------------------------------------------


class TextDelta(Struct, frozen=True):
    text: str


class ThinkingDelta(Struct, frozen=True):
    text: str


class ToolCallStart(Struct, frozen=True):
    """The name of the next tool call is known; argument deltas follow until ToolCallEnd."""

    id: str
    name: str
    namespace: str | None = None
    custom: bool = False


class ToolCallDelta(Struct, frozen=True):
    arguments: str


class ToolCallEnd(Struct, frozen=True):
    """The call is complete."""


AnswerEvent: TypeAlias = TextDelta | ThinkingDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
