"""Accounts in words: what changed in the prompt, and who changed it."""

import pytest

from kvmesh.bus.messages import CacheAccount, CacheLoss, PromptChange
from kvmesh.observer.cache_text import account_lines, change_line, lost_for


def change(part: str, way: str, **fields: object) -> PromptChange:
    return PromptChange(token=7, part=part, way=way, **{"index": 3, "name": "assistant", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            change("tool", "changed", name="mcp__big__t", offset=4),
            "tool 3 (mcp__big__t) changed at",
        ),
        (change("message", "removed"), "message 3 (assistant) removed"),
        (change("thinking", "removed"), "thinking of message 3 removed"),
        (
            change("thinking", "not_returned"),
            "the client did not return the thinking of the last answer (message 3)",
        ),
        (
            change("call", "rewritten", name="Edit"),
            "the client returned tool call Edit with other arguments",
        ),
        (change("thinking", "rerendered"), "the chat template left out the thinking of message 3"),
        (
            change("message", "rerendered"),
            "the chat template wrote message 3 (assistant) in another form",
        ),
        (change("of a newer version", "odd"), "text odd"),
    ],
)
def test_a_change_says_who_made_it(found: PromptChange, words: str) -> None:
    assert words in change_line(found)
    assert words.removesuffix(" at") in lost_for(CacheAccount(prompt_tokens=9, change=found))


def test_a_reason_is_not_told_twice() -> None:
    losses = [
        CacheLoss(first=0, tokens=2, reason="evicted"),
        CacheLoss(first=2, tokens=5, reason="call_rewritten"),
    ]
    found = change("call", "rewritten", name="Edit")
    account = CacheAccount(prompt_tokens=9, losses=losses, change=found)
    assert lost_for(account) == (
        "evicted as the least recently used;"
        " the client returned tool call Edit with other arguments"
    )
    lines = "\n".join(account_lines(account, []))
    assert "after a tool call that the client returned with other arguments" in lines
