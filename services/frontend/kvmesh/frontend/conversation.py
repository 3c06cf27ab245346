"""Internal form of requests and answers, common to all APIs.

Content is a list of typed blocks in generation order, so that interleaved thinking and tool
calls survive a round trip through any API.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from kvmesh.bus.messages import Guided, Hints, Placement, Retain, Sampling
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo
from kvmesh.tracing.span import NO_SPAN, TraceSpan


class CacheControl(Struct, frozen=True):
    """Cache the prompt up to this point for `ttl_s` seconds."""

    ttl_s: float


class Text(Struct, frozen=True):
    text: str
    cache: CacheControl | None = None


class Thinking(Struct, frozen=True):
    """A reasoning span."""

    text: str


class Image(Struct, frozen=True):
    """An image by its http(s) or data URL."""

    url: str
    cache: CacheControl | None = None


class ImageFile(Struct, frozen=True, weakref=True, eq=False):
    """An image that can be decoded, with its size in pixels; `digest`: the SHA-256 of `data`."""

    digest: bytes
    data: bytes
    width: int
    height: int


class ShownImage(NamedTuple):
    """An image that a model reads, which has `length` tokens in the prompt."""

    file: ImageFile
    length: int


class AttachedFile(Struct, frozen=True):
    """A file that no model here reads; `kind` names it in words, such as "PDF document".

    `context`: what the client says about it.
    """

    kind: str
    name: str = ""
    context: str = ""
    cache: CacheControl | None = None


ResultPart: TypeAlias = Text | Image | AttachedFile


class ToolCall(Struct, frozen=True):
    """`arguments` is JSON text for functions and free text for custom (grammar) tools."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    custom: bool = False
    cache: CacheControl | None = None


class ToolResult(Struct, frozen=True):
    """`references` names deferred tools that are available from this result on."""

    call_id: str
    content: list[ResultPart]
    is_error: bool = False
    references: list[str] = []
    cache: CacheControl | None = None


class ToolNotice(Struct, frozen=True):
    """Marks the point from which the tool is available, or with `removed` no longer."""

    name: str
    removed: bool = False


class Insertion(NamedTuple):
    """The characters `start` to `end` of a prompt are an answer with these packed tokens."""

    start: int
    end: int
    tokens: bytes


class RenderedPrompt(NamedTuple):
    """A prompt's text, and the answers in it whose tokens are known, in order.

    `cuts`: offsets, in order, on whose sides the text is encoded apart, so that a control token's
    text in a message does not become that token.
    """

    text: str
    insertions: Sequence[Insertion] = ()
    cuts: Sequence[int] = ()


# Between two texts of one turn that other blocks separate, where both become one text: white space
# next to calls and thinking belongs to the model's syntax and is in neither.
GAP = "\n\n"


class ConversationSummary(Struct, frozen=True):
    """A summary that stands for the conversation before it; empty if it could not be made.

    `system` are the leading system texts of that conversation, where they were parts of it, and
    `origin` is the key of its first message.
    """

    text: str
    cache: CacheControl | None = None
    system: tuple[str, ...] = ()
    origin: int = 0


Block: TypeAlias = (
    Text
    | Thinking
    | Image
    | AttachedFile
    | ToolCall
    | ToolResult
    | ToolNotice
    | ConversationSummary
)


class Generated(Struct, frozen=True):
    """Packed tokens of an answer as a model generated them, and their text.

    The text has the special tokens, but not the one that ends the answer. `opening` is the end of
    the prompt, from the beginning of the answer's turn on.
    """

    opening: str
    text: str
    tokens: bytes


class Message(Struct, frozen=True):
    """`generated`: this answer as it was generated, which the prompt shows in place of `blocks`."""

    role: Literal["system", "user", "assistant", "tool"]
    blocks: list[Block]
    generated: Generated | None = None


class Tool(Struct, frozen=True):
    """`parameters` is a JSON schema. A deferred tool is rendered only where it is referenced.

    `grammar` of a custom tool is a Lark grammar, or with `regex` a regular expression.
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
    """The model may or must call one of the tools named by `allowed`; None: any tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None


class ClearToolUses(Struct, frozen=True):
    """Replace old tool results by a placeholder once the prompt exceeds a trigger.

    The trigger is `tokens` of the prompt, or `uses` of tools. `keep` results stay, and those of the
    tools in `exclude`. Nothing is cleared unless that frees `at_least` tokens. `inputs`: the tools
    whose arguments are cleared, too; None for all tools.
    """

    tokens: int | None
    uses: int | None
    keep: int
    at_least: int = 0
    exclude: frozenset[str] = frozenset()
    inputs: frozenset[str] | None = frozenset()


class ClearThinking(Struct, frozen=True):
    """Drop the thinking of all turns but the last `keep` that have any."""

    keep: int


DEFAULT_COMPACT = 150_000


class Compact(Struct, frozen=True):
    """Have the model summarize the conversation once the prompt exceeds `tokens`.

    None: three quarters of the context, at most DEFAULT_COMPACT. With `pauses` the answer ends with
    the summary. `instructions` take the place of the usual ones. `always`: whatever the prompt's
    size; without a summary the request then fails.
    """

    tokens: int | None = None
    pauses: bool = False
    instructions: str | None = None
    always: bool = False


class ContextEdits(Struct):
    """Edits of a conversation before it is rendered, and what they did.

    `applied` describes the edits that had an effect, as the Messages API does; `original_tokens`
    counts the prompt without them. `compacts`: the prompt exceeds the trigger of `compact`.
    """

    thinking: ClearThinking | None = None
    tool_uses: ClearToolUses | None = None
    compact: Compact | None = None
    compacts: bool = False
    applied: list[dict[str, Any]] = []
    original_tokens: int | None = None


class GenerateRequest(Struct, kw_only=True):
    """One request of any API, before the chat template.

    - `prompts`: texts or token ids, used instead of `messages` (completions).
    - `sampling.max_tokens` of 0: as many as fit the context.
    - `annotations`: facts that the stream has as events of their own.
    - `token_names`: log-probabilities name tokens by their ids.
    - `thinking_budget`: most tokens of thinking, after which the answer begins.
    - `retention`, `decode`: requested retention of ranges of the prompt, and of the output.
    - `prompt_ttl_s`: requested retention time of the whole prompt.
    - `speculative`: prefill the predicted next prompt once this request ends.
    - `cache_salt`: name of the tenant as the caller gives it; its tag after authorization.
    - `tenant_name`, `key_name`: tenant and API key as people call them, for logs and usage.
    - `client_id`: the client's own id of the request.
    - `owner`: fair queues for threads alternate between owners.
    - `previous_message`: id of the answer to the conversation's earlier request, for a diagnosis of
      its cache; empty for a diagnosis without one, None for none.
    - `body_bytes`: size of the body and of what is read or decompressed for it; `light`: these are
      few values, if not few bytes.
    - `content_field`: name of the body's field that holds the messages, for errors.
    - `agent`: kind of the agent that sends the request (`apis.agent_kinds`).
    - `span`: the first span of the request's trace.
    - `target`: the model that serves it, where `model` is an alias.
    - `shadow`: it is a copy of a request, whose answer nobody gets.
    - `memo`: results of the work on the messages for the conversation's next request.
    - `images`: those of the messages by their URLs, if the model reads images; a text says why one
      cannot be shown.
    - `origin`: key of the first message that a summary replaces, else 0.
    """

    id: str
    model: str
    sampling: Sampling
    messages: list[Message] = []
    prompts: Sequence[str | list[int]] = ()
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
    retention: Sequence[Retain] = ()
    decode: Retain | None = None
    prompt_ttl_s: float | None = None
    speculative: bool = False
    adapter: str | None = None
    extra_fields: frozenset[str] = frozenset()
    annotations: frozenset[str] = frozenset()
    token_names: bool = False
    thinking_budget: int | None = None
    ignored: list[str] = []
    body_bytes: int = 0
    light: bool = False
    content_field: str = "messages"
    owner: str = ""
    previous_message: str | None = None
    tenant_name: str = ""
    key_name: str = ""
    client_id: str = ""
    agent: str = ""
    span: TraceSpan = NO_SPAN
    context_edits: ContextEdits | None = None
    memo: TurnMemo = NO_MEMO
    target: str = ""
    shadow: bool = False
    origin: int = 0
    images: dict[str, ShownImage | str] = {}

    @property
    def turn(self) -> int:
        """Number of earlier turns: runs of assistant messages."""
        turns, before = 0, ""
        for message in self.messages:
            if message.role != before:
                before = message.role
                turns += before == "assistant"
        return turns

    @property
    def continues(self) -> bool:
        """True if there are earlier turns."""
        return "assistant" in [message.role for message in self.messages]

    @property
    def returns_thinking(self) -> bool:
        """True if the client returned the thinking of earlier answers, or there were none."""
        answered = False
        for message in self.messages:
            if message.role == "assistant":
                answered = True
                if Thinking in map(type, message.blocks):
                    return True
        return not answered

    @property
    def steers_routing(self) -> bool:
        """True if the request constrains the router's choice or changes its policy."""
        wanted = self.placement
        names = (wanted.instance, wanted.rank, wanted.prefill, wanted.prefill_rank)
        named = any(name is not None for name in names)
        return bool(named or wanted.exclude or wanted.allow or self.policy or self.overrides)

    def retain_prompt(self, ttl_s: float | None) -> None:
        """Request retention of the whole prompt for at least `ttl_s` seconds, if any."""
        if ttl_s is not None:
            self.prompt_ttl_s = max(ttl_s, self.prompt_ttl_s or 0.0)


# --- the answer, as a stream of events ---------------------------------------------------------


class TextDelta(Struct, frozen=True):
    text: str


class ThinkingDelta(Struct, frozen=True):
    text: str


class ToolCallStart(Struct, frozen=True):
    """Start of a tool call; argument deltas follow until ToolCallEnd."""

    id: str
    name: str
    namespace: str | None = None
    custom: bool = False


class ToolCallDelta(Struct, frozen=True):
    arguments: str


class ToolCallEnd(Struct, frozen=True):
    """The call is complete."""


AnswerEvent: TypeAlias = TextDelta | ThinkingDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
_object = msgspec.json.Decoder(dict[str, Any])


def is_object(text: str) -> bool:
    """True if the text is a whole JSON object, as the arguments of a call are."""
    try:
        _object.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
