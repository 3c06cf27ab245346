"""A burst of prompts with a common prefix: siblings share a rank while the cost favours it."""

from random import Random

from support.routing import BLOCK, overlaps, request, sequence, worker

from kvmesh.bus.messages import Decision, SeqFree, SeqPrefilled
from kvmesh.router.placement.router import RouterCore
from kvmesh.settings.schema import RouterSettings


def sibling(number: int) -> bytes:
    """A prompt with 40 common and 8 own blocks."""
    return sequence(*range(40), *(1000 * number + own for own in range(8)))


def core(busy: int, predicted_ttl_s: float = 5.0) -> RouterCore:
    """An idle worker "a", and "b" and "c" with `busy` blocks of decoding."""
    settings = RouterSettings(
        predicted_ttl_s=predicted_ttl_s, queue_threshold=0.0, prefill_weight=1.0
    )
    router = RouterCore("m", "r", settings, Random(7))
    for name in "abc":
        router.join(worker(name))
    router.table.active_blocks[1:3] = busy
    return router


def place(router: RouterCore, number: int, now: float = 0.0) -> Decision:
    decision = router.decide(request(str(number), sibling(number)), None, now)
    router.commit(decision, now)
    return decision


def burst(router: RouterCore, count: int) -> str:
    return "".join(place(router, number).chosen.instance for number in range(count))


def test_siblings_share_a_rank_until_their_load_outweighs_the_prefix() -> None:
    # On a the n-th after the first costs 40 + 8n to wait for, 8 to compute and 48 + 8n to decode;
    # elsewhere 48 to compute and 48 + 60 to decode: 112, 128, 144, 160 against 156.
    went = burst(core(busy=60), 5)
    assert went[:4] == "aaaa"
    assert went[4] in "bc"


def test_without_predictions_siblings_spread_sooner() -> None:
    # The second costs 48 + 48 + 56 on a, the third 96 + 48 + 64: against 156 elsewhere.
    went = burst(core(busy=60, predicted_ttl_s=0.0), 3)
    assert went[:2] == "aa"
    assert went[2] in "bc"


def test_idle_workers_compute_the_prefix_rather_than_wait_for_it() -> None:
    router = core(busy=0)
    # To wait 48, to compute 8 and to decode 56 where the first is; elsewhere 48 and 48.
    assert len(set(burst(router, 3))) == 3


def test_siblings_share_a_rank_again_after_the_first_token() -> None:
    router = core(busy=0)
    homes = burst(router, 3)
    router.apply(SeqPrefilled("0"), 0.1)
    later = place(router, 3, 0.1)
    assert later.chosen.instance == homes[0]
    assert later.chosen.overlap == [40, 0, 0, 0]
    assert later.chosen.cost == 8 + 56


def test_a_sibling_counts_only_its_own_blocks() -> None:
    router = core(busy=60)
    burst(router, 3)
    slot = router.table.slot("a", 0)
    assert router.table.prefill_tokens[slot] == (48 + 8 + 8) * BLOCK
    assert router.table.active_blocks[slot] == 48 + 8 + 8


def test_a_session_leaves_an_overloaded_worker_and_stays_where_it_went() -> None:
    router = RouterCore("m", "r", RouterSettings(queue_threshold=0.0), Random(7))
    for name in "ab":
        router.join(worker(name))

    def turn(number: int, held: dict[str, tuple[int, ...]]) -> str:
        """Place the session's turn with 40 more blocks than the last, then let it end."""
        prompt = sequence(*range(40 * (number + 1)))
        name = f"turn{number}"
        decision = router.decide(request(name, prompt), overlaps(held), 10.0 * number)
        router.commit(decision, 10.0 * number)
        router.apply(SeqFree(name), 10.0 * number + 5)
        return decision.chosen.instance

    first = turn(0, {})
    other = "b" if first == "a" else "a"
    assert turn(1, {first: (40,)}) == first
    slot = router.table.slot(first, 0)
    router.table.prefill_tokens[slot] = 100 * 8192.0  # far past what its 80 blocks there save
    assert turn(2, {first: (80,)}) == other
    router.table.prefill_tokens[slot] = 0.0
    assert turn(3, {first: (80,), other: (120,)}) == other
    assert turn(4, {first: (80,), other: (160,)}) == other
