"""Archives on cards: of one environment and domain, from the oldest worker on."""

from kvmesh.bus.messages import CompiledOffer, Instance, Role
from kvmesh.worker.compiled.environment import CompileEnvironment
from kvmesh.worker.compiled.exchange import MAX_TRIED, offer_of, offered_archives

KEY, OTHER = b"k" * 32, b"o" * 32
ENVIRONMENT = CompileEnvironment({"torch": "2.13"})


def card(started: float, offer: CompiledOffer | None) -> Instance:
    return Instance(
        instance=f"w{started:g}",
        role=Role.WORKER,
        name="w",
        version="",
        started=started,
        compiled=offer,
    )


def ours(digest: str) -> CompiledOffer:
    return offer_of(ENVIRONMENT, KEY, digest)


def test_the_oldest_come_first_and_once() -> None:
    cards = [card(3, ours("c")), card(1, ours("a")), card(2, ours("a")), card(0, None)]
    assert offered_archives(cards, ENVIRONMENT, KEY) == (["a", "c"], [])
    many = [card(n, ours(str(n))) for n in range(10)]
    assert len(offered_archives(many, ENVIRONMENT, KEY)[0]) == MAX_TRIED


def test_other_environments_and_domains_are_passed_over() -> None:
    other = CompileEnvironment({"torch": "2.14"})
    cards = [card(1, offer_of(other, KEY, "a")), card(2, offer_of(ENVIRONMENT, OTHER, "b"))]
    assert offered_archives(cards, ENVIRONMENT, KEY) == ([], [])


def test_false_proofs_are_named() -> None:
    forged = CompiledOffer(ENVIRONMENT.label(KEY), "x", ENVIRONMENT.mac(OTHER, "x"))
    moved = CompiledOffer(ENVIRONMENT.label(KEY), "y", ENVIRONMENT.mac(KEY, "z"))
    odd = CompiledOffer(ENVIRONMENT.label(KEY), "z", "é")
    cards = [card(n, offer) for n, offer in enumerate([forged, moved, odd, ours("a")])]
    assert offered_archives(cards, ENVIRONMENT, KEY) == (["a"], ["w0", "w1", "w2"])
