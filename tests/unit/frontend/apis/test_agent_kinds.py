"""Kinds of agents, by the headers that they send."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from unit.frontend.apis.bodies import headers, request

from kvmesh.frontend.apis.agent_kinds import KINDS, OTHER, agent_kind


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (headers(), OTHER),
        (headers(user_agent="claude-cli/2.1.329 (external, cli)"), "claude-code"),
        (headers(user_agent="x", x_claude_code_session_id="s"), "claude-code"),
        (headers(user_agent="codex_cli_rs/0.169.0 (Debian 13; x86_64) xterm"), "codex"),
        (headers(user_agent="codex-tui/0.169.0"), "codex"),
        (headers(user_agent="opencode/1.18.33 ai-sdk/provider-utils/4.0"), "opencode"),
        (headers(user_agent="ai-sdk/openai-compatible/2.0"), "ai-sdk"),
        (headers(user_agent="OpenAI/Python 3.52.0"), "openai-sdk"),
        (headers(user_agent="AsyncAnthropic/Python 2.11"), "anthropic-sdk"),
        (headers(user_agent="Agents/Python 0.24"), "openai-agents"),
        (headers(user_agent="GeminiCLI/0.30 (linux)"), "gemini-cli"),
        (headers(user_agent="Python/3.11 aiohttp/3.13"), "http-client"),
        (headers(user_agent="OpenAI/JS 5.20.1", x_initiator="agent"), "copilot"),
        (headers(user_agent="our-tool/claude-cli"), OTHER),
        (headers(user_agent="pydantic-ai/2.68.0"), "pydantic-ai"),
        (headers(user_agent="ls/JS 5.23.2"), "continue"),
        (headers(user_agent="ls/1.0"), OTHER),
        (headers(user_agent="Continue/IDE"), "continue"),
        (headers(user_agent="OpenAI/JS 6.1.0", x_title="Cline"), "cline"),
        (headers(user_agent="OpenAI/JS 6.1.0", x_title="Kilo Code"), "kilo-code"),
        (headers(user_agent="OpenAI/JS 6.1.0", x_title="Our program"), "openai-sdk"),
        (headers(user_agent="QwenCode/0.24.4 (linux; x64)"), "qwen-code"),
        (headers(user_agent="Kilo-Code/7.7.7"), "kilo-code"),
        (
            headers(user_agent="semantic-kernel-python/1.45.0 AsyncOpenAI/Python 3.5"),
            "semantic-kernel",
        ),
        (headers(user_agent="AsyncOpenAI/Python 3.5 strands-agents/1.62"), "strands"),
        (headers(user_agent="smolagents/1.26.0"), "smolagents"),
        (headers(user_agent="llama-index/0.8"), "llama-index"),
        (headers(user_agent="llama-cpp-client/0.8"), OTHER),
        (headers(user_agent="mini-swe-agent/2.4.6"), "mini-swe-agent"),
        (headers(user_agent="deepagents/0.7.32"), "deepagents"),
        (headers(user_agent="mastra/1.71.0 ai-sdk/openai-compatible/3.0"), "mastra"),
        (headers(user_agent="our-app/1.0 ai/7.0.173 ai-sdk/provider-utils/4.0"), "ai-sdk"),
        (headers(user_agent="pi-coding-agent"), "pi"),
        (headers(user_agent="pi/0.73.1 (linux; node/v22)"), "pi"),
        (headers(user_agent="pip/25.0"), OTHER),
        (headers(user_agent="k6/0.49.0 (https://k6.io/)"), "k6"),
        (headers(user_agent="hey/0.0.1"), "hey"),
        (headers(user_agent="Go-http-client/1.1"), OTHER),
        (headers(user_agent="aiperf/0.13.0", x_session_affinity="fixed-schedule-1"), "aiperf"),
        (headers(user_agent="aiperf/0.13.0", x_claude_code_session_id="s"), "aiperf"),
        (headers(user_agent="guidellm/0.3"), "guidellm"),
        (headers(user_agent="locust/2.4"), "locust"),
        (headers(user_agent="our-tool/1.0", x_session_affinity="s"), OTHER),
        (
            headers(user_agent="Python/3.12 aiohttp/3.13", x_request_id="bench-0a1b2c3d-17"),
            "vllm-bench",
        ),
        (headers(user_agent="our-tool/1.0", x_request_id="bench-0a1b2c3d-17"), OTHER),
        (headers(user_agent="python-requests/2.32"), "http-client"),
        (headers(user_agent="python-httpx/0.28"), "http-client"),
        (headers(user_agent="curl/8.14.1"), "curl"),
        (headers(user_agent="Mozilla/5.0 (X11; Linux) Cursor/0.4 Chrome/130"), "cursor"),
        (headers(user_agent="Mozilla/5.0 (X11; aider/1)"), "browser"),
    ],
)
def test_harnesses_are_recognised(head: CIMultiDict[str], kind: str) -> None:
    assert agent_kind(head, child=False) == kind
    assert agent_kind(head, child=True) == f"{kind}/subagent"


def test_a_subagent_of_codex_is_one_without_a_parent() -> None:
    head = headers(user_agent="codex_exec/0.169.0", x_openai_subagent="review")
    assert agent_kind(head, child=False) == "codex/subagent"


def test_a_request_has_the_kind_of_its_agent() -> None:
    assert request(headers(user_agent="claude-cli/2.1", x_session_id="s")).agent == "claude-code"
    child = headers(user_agent="claude-cli/2.1", x_session_id="s", x_parent_session_id="p")
    assert request(child).agent == "claude-code/subagent"


@given(st.text(max_size=200))
def test_a_hostile_user_agent_is_one_of_the_kinds(text: str) -> None:
    assert agent_kind({"user-agent": text}, child=False) in KINDS
