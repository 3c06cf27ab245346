"""Facts that a worker which wakes takes over from the time before it fell asleep."""

from dataclasses import dataclass, field

from kvmesh.bus.messages import ModelCard, Phase


@dataclass(frozen=True)
class BeforeStandby:
    """Facts of its card, and the id of each rank's next KV event.

    Events of one instance never repeat an id: indexers would take them for old ones. `startup_s`
    and `phases` are those of the start, which falling asleep does not change. `serves` is the role
    that the worker had last, empty for that of its settings, and `model` is what it has served.
    """

    serves: str = ""
    model: ModelCard | None = None
    startup_s: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    next_events: dict[int, int] = field(default_factory=dict)
