"""The workers that have a LoRA adapter or its files, for `kvmesh model adapter`."""

from collections.abc import Iterable, Iterator

from kvmesh.bus.discovery.compatibility import Compatibility
from kvmesh.bus.messages import AdapterFiles, Instance, adapter_name
from kvmesh.runtime.quantities import size


def offered_files(workers: Iterable[Instance], name: str) -> AdapterFiles | None:
    """The files of the adapter that a name stands for, as some worker offers them; None if none.

    That is the one that the oldest worker has loaded, else the one that the oldest worker offers.
    """
    cards = sorted(workers, key=lambda card: card.started)
    offered = {
        files.adapter: files
        for card in reversed(cards)
        if card.adapters is not None
        for files in card.adapters.files
    }
    loaded = (i for card in cards if card.model is not None for i in card.model.adapters)
    for identity in (*loaded, *reversed(offered)):
        if adapter_name(identity) == name and identity in offered:
            return offered[identity]
    return None


def adapter_lines(workers: list[Instance]) -> Iterator[str]:
    """A line for each adapter: where requests are served, who has its files, and what it costs."""
    for model in sorted({card.model.name for card in workers if card.model is not None}):
        group = Compatibility()
        for card in workers:
            if card.model is not None and card.model.name == model:
                group.join(card)
        yield from _lines_of(model, list(group.fitting))


def _lines_of(model: str, cards: list[Instance]) -> Iterator[str]:
    loaded: dict[str, list[str]] = {}
    serving: dict[str, str] = {}
    offered: dict[str, list[tuple[str, AdapterFiles]]] = {}
    for card in cards:
        for identity in card.model.adapters if card.model is not None else ():
            loaded.setdefault(identity, []).append(card.name)
            if not card.draining and card.serves != "prefill":
                serving.setdefault(adapter_name(identity), identity)
        for files in card.adapters.files if card.adapters is not None else ():
            offered.setdefault(files.adapter, []).append((card.name, files))
    for identity in sorted(loaded.keys() | offered.keys()):
        parts = []
        if identity in loaded:
            state = "serves" if identity in serving.values() else "replaced"
            parts.append(f"{state} on {', '.join(sorted(loaded[identity]))}")
        if identity in offered:
            parts.append(_files_text(offered[identity]))
        yield f"{model}: {identity} {'; '.join(parts)}"


def _files_text(offers: list[tuple[str, AdapterFiles]]) -> str:
    names = ", ".join(sorted(name for name, _ in offers))
    times = [files.load_s for _, files in offers if files.load_s]
    took = f", loads in {max(times):.2g} s" if times else ""
    return f"files on {names} ({size(offers[0][1].size)}{took})"
