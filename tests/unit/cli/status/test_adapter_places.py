"""The places of adapters, as `kvmesh model adapter` chooses and lists them."""

from msgspec.structs import replace
from support.routing import worker

from kvmesh.bus.messages import AdapterFiles, AdapterHost, Instance
from kvmesh.cli.status.adapter_places import adapter_lines, offered_files

OLD, NEW = "poet@" + "1" * 16, "poet@" + "2" * 16
CRITIC = "critic@" + "3" * 16


def card(name: str, started: float, *loaded: str, offers: tuple[str, ...] = ()) -> Instance:
    files = [AdapterFiles(adapter=each, digest=each[-4:], size=3 << 20) for each in offers]
    host = AdapterHost(limit=2, files=files)
    return replace(worker(name, adapters=list(loaded), started=started), adapters=host)


def test_a_name_stands_for_what_the_oldest_worker_serves() -> None:
    oldest = card("a", 1.0, offers=(OLD, CRITIC))
    newer = card("b", 2.0, NEW, offers=(NEW,))
    for cards in ([oldest, newer], [newer, oldest]):
        found = offered_files(cards, "poet")
        assert found is not None
        assert found.adapter == NEW, "it is loaded, the older one's is not"
    found = offered_files([oldest], "poet")
    assert found is not None
    assert found.adapter == OLD
    assert offered_files([oldest, newer], "bard") is None
    assert offered_files([worker("old")], "poet") is None
    assert offered_files([card("a", 1.0, OLD)], "poet") is None, "nobody has its files"


def test_the_oldest_offer_counts_if_none_is_loaded() -> None:
    cards = [card("b", 2.0, offers=(NEW,)), card("a", 1.0, offers=(OLD,))]
    found = offered_files(cards, "poet")
    assert found is not None
    assert found.adapter == OLD


def test_each_adapter_has_a_line_with_its_places_and_cost() -> None:
    first = card("w-1", 1.0, OLD, offers=(OLD, CRITIC))
    assert first.adapters is not None
    timed = [replace(first.adapters.files[0], load_s=0.254), first.adapters.files[1]]
    first = replace(first, adapters=replace(first.adapters, files=timed))
    cards = [card("w-2", 2.0, NEW, OLD, offers=(NEW,)), first, worker("plain", adapters=["bare"])]
    assert list(adapter_lines(cards)) == [
        "m: bare serves on plain",
        f"m: {CRITIC} files on w-1 (3.0 MiB)",
        f"m: {OLD} serves on w-1, w-2; files on w-1 (3.0 MiB, loads in 0.25 s)",
        f"m: {NEW} replaced on w-2; files on w-2 (3.0 MiB)",
    ]
