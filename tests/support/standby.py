"""Cards of workers on standby."""

from kvmesh.bus.messages import Instance, Role
from support.planned_model import START


def standby_card(
    instance: str, started: float = START, asleep: bool = False, name: str = ""
) -> Instance:
    return Instance(
        instance=instance, role=Role.PARKED, name=name or instance, version="", started=started,
        parked_for="m", asleep=asleep,
    )  # fmt: skip
