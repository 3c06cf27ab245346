"""Suspects: the request that is found to crash engines, among those on lost ones."""

from kvmesh.frontend.dispatch.suspects import PROVEN_TOKENS, Suspects


def dispatch(suspects: Suspects, request: str, instance: str, tokens: int = 0) -> None:
    suspects.dispatched(request, instance, lambda: tokens)


def test_the_second_engine_lost_before_a_token_names_the_culprit() -> None:
    suspects = Suspects()
    assert not suspects.lost("p", "a", 0, reported=False)
    dispatch(suspects, "p", "b")
    assert suspects.lost("p", "b", 0, reported=False)
    assert "p" not in suspects


def test_a_stream_whose_workers_are_killed_one_by_one_is_no_suspect() -> None:
    suspects = Suspects()
    for instance in "abcdef":
        assert not suspects.lost("s", instance, 3, reported=False)
        assert "s" not in suspects


def test_an_engine_that_fails_by_its_own_word_counts_within_the_first_tokens() -> None:
    suspects = Suspects()
    assert not suspects.lost("p", "a", 5, reported=True)
    dispatch(suspects, "p", "b")
    assert suspects.lost("p", "b", PROVEN_TOKENS - 1, reported=True)
    assert not suspects.lost("q", "c", PROVEN_TOKENS, reported=True)
    assert "q" not in suspects


def test_a_suspect_whose_engine_makes_tokens_is_cleared() -> None:
    suspects = Suspects()
    suspects.lost("s", "a", 0, reported=False)
    dispatch(suspects, "s", "b", 1)
    assert not suspects.lost("s", "b", 1, reported=False)
    assert not suspects.lost("s", "c", 0, reported=False)


def test_of_those_that_were_there_once_none_is_named() -> None:
    suspects = Suspects()
    for request in ("p", "x", "y"):
        assert not suspects.lost(request, "a", 0, reported=True)
    assert all(request in suspects for request in ("p", "x", "y"))


def test_of_two_suspects_that_got_equally_far_neither_is_named() -> None:
    suspects = Suspects()
    for request in ("p", "x"):
        suspects.lost(request, "a", 0, reported=False)
        dispatch(suspects, request, "b")
    assert not suspects.lost("p", "b", 0, reported=False)
    assert "p" in suspects


def test_of_two_suspects_the_one_that_got_less_far_is_named_and_the_other_is_not() -> None:
    for order in (("p", "x"), ("x", "p")):
        suspects = Suspects()
        tokens = {"p": 0, "x": 7}
        for request, made in tokens.items():
            suspects.lost(request, "a", 0, reported=True)
            dispatch(suspects, request, "b", made)
        named = [r for r in order if suspects.lost(r, "b", tokens[r], reported=True)]
        assert named == ["p"]


def test_who_was_beside_a_culprit_does_not_become_a_suspect() -> None:
    suspects = Suspects()
    suspects.lost("p", "a", 0, reported=False)
    dispatch(suspects, "p", "b")
    assert suspects.lost("p", "b", 0, reported=True)
    assert not suspects.lost("new", "b", 0, reported=True)
    assert "new" not in suspects


def test_what_has_ended_is_forgotten() -> None:
    suspects = Suspects()
    suspects.lost("p", "a", 0, reported=False)
    suspects.forget("p")
    assert not suspects.lost("p", "b", 0, reported=False)
