"""Kind of agent that sends a request, from its headers; one of a fixed set of names. Pure."""

import re
from functools import lru_cache

from kvmesh.frontend.apis.base import Headers

OTHER = "other"
SUBAGENT = "/subagent"
MAX_AGENT = 512  # characters of a user agent; the rest is not read
_COMMENT = re.compile(r"\([^()]*\)")
_FIRST_WORD = re.compile(r"[a-z]{1,32}")
# by the beginning of a product's name
_NAMES = {
    "agent-framework": "agent-framework",
    "gemini-cli": "gemini-cli",
    "genai-perf": "genai-perf",
    "google-adk": "google-adk",
    "inference-perf": "inference-perf",
    "k6/": "k6",
    "kimi-cli": "kimi-cli",
    "llama-index": "llama-index",
    "llama_index": "llama-index",
    "mini-swe-agent": "mini-swe-agent",
    "mistral-vibe": "mistral-vibe",
    "pi-coding-agent": "pi",
    "pydantic-ai": "pydantic-ai",
    "qwen-code": "qwen-code",
    "semantic-kernel": "semantic-kernel",
}
# by the first word of a product's name: "claude-cli/2.1", "codex_exec/0.9"
_WORDS = {
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
    "kilocode": "kilo-code",
    "cline": "cline",
    "continue": "continue",
    "cursor": "cursor",
    "goose": "goose",
    "aider": "aider",
    "crush": "crush",
    "zed": "zed",
    "minisweagent": "mini-swe-agent",
    "pi": "pi",
    "agents": "openai-agents",
    "deepagents": "deepagents",
    "langchain": "langchain",
    "litellm": "litellm",
    "llamaindex": "llama-index",
    "mastra": "mastra",
    "smolagents": "smolagents",
    "strands": "strands",
    "aiperf": "aiperf",
    "artillery": "artillery",
    "gatling": "gatling",
    "guidellm": "guidellm",
    "hey": "hey",
    "locust": "locust",
    "oha": "oha",
    "vegeta": "vegeta",
    "wrk": "wrk",
}
# libraries and programs that anything may send requests with
_GENERIC = {
    "openai": "openai-sdk",
    "asyncopenai": "openai-sdk",
    "azureopenai": "openai-sdk",
    "asyncazureopenai": "openai-sdk",
    "anthropic": "anthropic-sdk",
    "asyncanthropic": "anthropic-sdk",
    "ai": "ai-sdk",
    "curl": "curl",
    "python": "http-client",
    "node": "http-client",
    "axios": "http-client",
    "mozilla": "browser",
}
# by a header that only this harness sends; X-Session-Affinity is a convention of many
_HEADERS = {
    "x-claude-code-session-id": "claude-code",
    "x-codex-parent-thread-id": "codex",
    "x-openai-subagent": "codex",
    "x-initiator": "copilot",
}
_VLLM_BENCH = "vllm-bench"
_VLLM_BENCH_ID = re.compile(r"bench-[0-9a-f]{8}-")  # its default prefix of X-Request-Id
_TITLES = ("x-title", "x-openrouter-title")  # of the program, as OpenRouter asks for it
# JavaScript's SDKs send the name of their class, which Continue's build shortens
_SHORTENED = {"ls/js": "continue"}
KINDS = frozenset(
    (
        *(*_NAMES.values(), *_WORDS.values(), *_GENERIC.values()),
        *(*_HEADERS.values(), *_SHORTENED.values(), _VLLM_BENCH, OTHER),
    )
)
LOAD_GENERATORS = frozenset(
    (
        *("aiperf", "artillery", "gatling", "genai-perf", "guidellm", "hey", "inference-perf"),
        *("k6", "locust", "oha", "vegeta", "wrk", _VLLM_BENCH),
    )
)
HARNESSES = frozenset(
    (
        *("claude-code", "codex", "opencode", "gemini-cli", "qwen-code", "kimi-cli", "openhands"),
        *("roo-code", "kilo-code", "cline", "continue", "cursor", "goose", "aider", "crush", "zed"),
        *("copilot", "mini-swe-agent", "mistral-vibe", "pi"),
    )
)


def agent_kind(headers: Headers, child: bool) -> str:
    """The kind, such as `claude-code`; with `/subagent` if it is the `child` of another session.

    The agent is recognised by its user agent, by a header of its own, or by the title that it gives
    itself; else the kind is that of its library, or `other`. An agent in the user agent counts
    before the library that it names, too.
    """
    agent, library = _named((headers.get("user-agent") or "")[:MAX_AGENT])
    if agent is None:
        agent = next((kind for name, kind in _HEADERS.items() if headers.get(name)), None)
    kind = agent or _titled(headers) or library
    if kind == "http-client" and _VLLM_BENCH_ID.match(headers.get("x-request-id") or ""):
        kind = _VLLM_BENCH
    return kind + SUBAGENT if child or headers.get("x-openai-subagent") else kind


def is_harness(agent: str) -> bool:
    """True for the kind of an agent, not of a library that others build agents with."""
    return agent.removesuffix(SUBAGENT) in HARNESSES


def is_load_generator(agent: str) -> bool:
    """True for the kind of a program that measures servers."""
    return agent.removesuffix(SUBAGENT) in LOAD_GENERATORS


@lru_cache(maxsize=1024)
def _named(user_agent: str) -> tuple[str | None, str]:
    """The kinds of the agent and of the library, or `other`, that a user agent names."""
    products = _products(user_agent)
    agent = next(filter(None, map(_agent, products)), None)
    return agent, next((_GENERIC[word] for word in map(_word, products) if word in _GENERIC), OTHER)


def _products(user_agent: str) -> list[str]:
    """The first word of a user agent, and those that are a product with its version."""
    words = _COMMENT.sub(" ", user_agent.lower()).split()
    return [*words[:1], *(word for word in words[1:] if "/" in word)]


def _agent(product: str) -> str | None:
    named = (kind for name, kind in _NAMES.items() if product.startswith(name))
    return next(named, None) or _SHORTENED.get(product) or _WORDS.get(_word(product))


def _titled(headers: Headers) -> str | None:
    for name in _TITLES:
        if title := headers.get(name):
            return _agent(title[:MAX_AGENT].lower().strip())
    return None


def _word(product: str) -> str:
    found = _FIRST_WORD.match(product)
    return "" if found is None else found[0]
