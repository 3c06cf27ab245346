"""Prompt deltas in tokens, from sender to receiver."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmesh.bus.messages import Sampling, Work
from kvmesh.prompt_delta.tokens import MIN_BYTES, PromptCache, SentPromptCache

TOKENS = MIN_BYTES // 4


def work(request: str, tokens: bytes, session: str | None = "s", salt: int = 1) -> Work:
    sampling = Sampling(max_tokens=1)
    return Work(
        request=request, frontend="f", tokens=tokens, sampling=sampling, session=session, salt=salt
    )


def prompt(length: int, first: int = 0) -> bytes:
    return array("I", range(first, first + length)).tobytes()


def grown(length: int, loose: int = 0) -> bytes:
    """A prompt whose last `loose` tokens differ from those of a longer one."""
    return prompt(length - loose) + prompt(loose, first=1 << 20)


turns = st.tuples(
    st.sampled_from(["s", "t", None]),
    st.sampled_from([1, 2]),
    st.sampled_from(["w-1", "w-2"]),
    st.integers(TOKENS // 2, TOKENS * 2),
    st.sampled_from([0, 3, 64, 65]),
)


@given(st.lists(turns, max_size=30), st.integers(0, 20 * TOKENS), st.integers(0, 20 * TOKENS))
def test_the_receiver_rebuilds_every_prompt(
    offered: list[tuple[str | None, int, str, int, int]], sender_limit: int, keeper_limit: int
) -> None:
    sent_prompts = SentPromptCache(sender_limit)
    workers = {name: PromptCache(keeper_limit) for name in ("w-1", "w-2")}
    for number, (session, salt, name, length, loose) in enumerate(offered):
        whole = work(f"r{number}", grown(length, loose), session, salt)
        sent = sent_prompts.shorten(name, whole)
        taken = workers[name].complete(sent)
        if taken is None:
            sent_prompts.forget(name, whole)
            sent, taken = whole, workers[name].complete(whole)
        assert taken == whole
        if workers[name].store(whole, sent.base):
            sent_prompts.store(name, whole)
        assert sent_prompts.size <= sender_limit
        assert workers[name].size <= keeper_limit


def test_a_turn_sends_only_new_tokens() -> None:
    sent_prompts = SentPromptCache()
    sent_prompts.store("w", work("a", grown(TOKENS, loose=8)))
    longer = work("b", prompt(TOKENS + 100))
    sent = sent_prompts.shorten("w", longer)
    assert sent.base == "a"
    assert sent.shared == TOKENS - 64
    assert sent.tokens == longer.tokens[4 * sent.shared :]
    assert sent_prompts.shorten("other", longer) is longer
    assert sent_prompts.shorten("w", replace(longer, session="t")).base == ""
    assert sent_prompts.shorten("w", replace(longer, salt=2)).base == ""


def test_a_prompt_replaces_its_base() -> None:
    prompts = PromptCache()
    assert prompts.store(work("a", prompt(TOKENS)))
    longer = replace(work("b", prompt(1)), base="a", shared=TOKENS)
    whole = prompts.complete(longer)
    assert whole is not None
    assert prompts.store(whole, "a")
    assert prompts.size == MIN_BYTES + 4
    assert prompts.complete(longer) is None
    assert not prompts.store(work("c", prompt(TOKENS - 1)))


def test_a_delta_cannot_share_more_than_the_base() -> None:
    prompts = PromptCache()
    prompts.store(work("a", prompt(TOKENS)))
    for shared in (-1, 0, TOKENS + 1):
        assert prompts.complete(replace(work("b", b""), base="a", shared=shared)) is None
