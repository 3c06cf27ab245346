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
        (headers(user_agent="our-tool/claude-cli"), OTHER),
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
