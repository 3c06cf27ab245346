"""Commands to running workers that a person names."""

import asyncio
import sys
from collections.abc import Callable, Collection

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Control, ControlReply, Instance, MessageDecoder, Role
from kvmesh.cli.flags import did_you_mean
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

POLL_S = 0.1
_replies = MessageDecoder(ControlReply)


class WorkerChoiceError(Exception):
    """The command cannot be sent: no such model or worker, or several models."""


async def chosen_workers(
    bus: Bus,
    settings: Settings,
    model: str | None,
    worker: str | None,
    roles: Collection[Role] = (Role.WORKER,),
) -> list[Instance]:
    """The cards of the workers of a model, or of the one called `worker`; None: of all; by name.

    `roles` are WORKER and PARKED, or one of them. Raises WorkerChoiceError if there are none.
    """
    only = next(iter(roles)) if len(roles) == 1 else None
    directory = Directory(bus, stream_limits(settings.streams), role=only)
    await directory.open()
    cards = [card for card in directory.instances if card.role in roles and model_of(card)]
    await directory.close()
    of_model = [card for card in cards if model in (None, model_of(card))]
    if not of_model:
        kind = "parked worker" if only is Role.PARKED else "worker"
        known = did_you_mean(model, set(map(model_of, cards))) if model else ""
        raise WorkerChoiceError(f"no {kind}{f' serves {model}{known}' if model else ''}")
    chosen = [c for c in of_model if worker is None or worker in (c.name, c.instance)]
    if not chosen:
        names = {card.name for card in of_model}
        raise WorkerChoiceError(f"no worker is called {worker}{did_you_mean(worker or '', names)}")
    return sorted(chosen, key=lambda card: card.name)


def model_of(card: Instance) -> str:
    """The model that a worker serves, or will serve once it is promoted; else empty."""
    return card.model.name if card.model is not None else card.parked_for


async def command_workers(
    bus: Bus, cards: Collection[Instance], command: Control, timeout_s: float, accepted: str
) -> bool:
    """Print what each worker replies, `accepted` if it obeys; True if all do."""
    replies = [await send_command(bus, card, command, timeout_s) for card in cards]
    for card, reply in zip(cards, replies, strict=True):
        text = accepted if reply.ok else reply.reason
        print(f"{card.instance}: {text}", file=sys.stdout if reply.ok else sys.stderr)
    return all(reply.ok for reply in replies)


async def await_role(
    bus: Bus,
    settings: Settings,
    workers: Collection[Instance],
    role: Role,
    timeout_s: float,
    text: Callable[[Instance], str],
) -> set[str]:
    """Print `text` of each worker once its card has the role; the instances of those left over.

    It takes `timeout_s` seconds at most.
    """
    missing = {card.instance for card in workers}
    directory = Directory(bus, stream_limits(settings.streams), role=role)
    await directory.open()
    try:
        async with asyncio.timeout(timeout_s):
            while missing:
                for card in directory.instances:
                    if card.instance in missing:
                        missing.remove(card.instance)
                        print(f"{card.instance}: {text(card)}")
                if missing:
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass
    finally:
        await directory.close()
    return missing


async def send_command(
    bus: Bus, card: Instance, command: Control, timeout_s: float
) -> ControlReply:
    """The reply of one worker; one with the reason if none comes within `timeout_s` seconds."""
    subject = bus.subjects.ctl(card.instance)
    try:
        return await bus.request(subject, command, _replies, timeout_s)
    except BusError as error:
        return ControlReply(False, cause(error))
