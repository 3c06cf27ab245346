"""Kind of agent that sends a request, from its headers; one of a fixed set of names. Pure."""

import re

from kvmesh.frontend.apis.base import Headers

OTHER = "other"
SUBAGENT = "/subagent"
_FIRST_WORD = re.compile(r"[A-Za-z]{1,32}")
# by the first word of the user agent: "claude-cli/2.1", "codex_exec/0.9", "OpenAI/Python 3.5"
_PRODUCTS = {
    "claude": "claude-code",
    "codex": "codex",
    "opencode": "opencode",
    "geminicli": "gemini-cli",
    "qwencode": "qwen-code",
    "kimicli": "kimi-cli",
    "openhands": "openhands",
    "roo": "roo-code",
    "roocode": "roo-code",
    "kilo": "kilo-code",
    "cline": "cline",
    "cursor": "cursor",
    "goose": "goose",
    "aider": "aider",
    "crush": "crush",
    "zed": "zed",
    "agents": "openai-agents",
    "litellm": "litellm",
    "langchain": "langchain",
    "openai": "openai-sdk",
    "asyncopenai": "openai-sdk",
    "anthropic": "anthropic-sdk",
    "asyncanthropic": "anthropic-sdk",
    "ai": "ai-sdk",
    "curl": "curl",
    "python": "http-client",
    "node": "http-client",
    "axios": "http-client",
    "mozilla": "browser",
}
# by a header that only this harness sends
_HEADERS = {
    "x-claude-code-session-id": "claude-code",
    "x-codex-parent-thread-id": "codex",
    "x-openai-subagent": "codex",
    "x-session-affinity": "opencode",
}
KINDS = frozenset((*_PRODUCTS.values(), OTHER))


def agent_kind(headers: Headers, child: bool) -> str:
    """The kind, such as `claude-code`; with `/subagent` if it is the `child` of another session.

    The agent is recognised by a header of its own or by its user agent; else it is `other`.
    """
    own = next((kind for name, kind in _HEADERS.items() if headers.get(name)), None)
    word = _FIRST_WORD.match(headers.get("user-agent") or "")
    named = None if word is None else _PRODUCTS.get(word[0].lower())
    kind = own or named or OTHER
    return kind + SUBAGENT if child or headers.get("x-openai-subagent") else kind
