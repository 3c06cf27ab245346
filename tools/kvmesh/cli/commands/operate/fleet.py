"""`kvmesh fleet`: commands to running workers: drain, sleep, promote and role."""

import argparse
import asyncio
import sys

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import Drain, Instance, Promote, Role, Serve, Sleep
from kvmesh.cli.arguments import failed, seconds
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.workers import (
    WorkerChoiceError,
    await_role,
    chosen_workers,
    command_workers,
    model_of,
    send_command,
)
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

REPLY_S = 5.0
ROLE_REPLY_S = 20.0  # more than a worker takes to reply
POLL_S = 0.2
ROLES = ("aggregated", "prefill", "decode")
# the roles of the workers that an action concerns
ACTIONS = {
    "drain": (Role.WORKER, Role.PARKED),
    "sleep": (Role.WORKER,),
    "promote": (Role.PARKED,),
    "role": (Role.WORKER,),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvmesh fleet drain|sleep|promote WORKER [options]\n"
        "       kvmesh fleet role WORKER ROLE [options]"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
drain    The worker accepts nothing new, finishes its requests within its
         worker.drain_timeout_s, and exits. What started it, such as `kvmesh up`
         or Kubernetes, may start it again.
sleep    It finishes its requests likewise, frees its device and waits.
promote  A parked or sleeping worker takes its device, loads the model and serves.
role     The worker serves whole requests, prefill or decode from now on; requests
         that run end where they are. Once restarted it has the role of its settings.
"""
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("worker", metavar="WORKER", help="its name or instance")
    parser.add_argument(
        "serves", nargs="?", choices=ROLES, metavar="ROLE", help=f"of role: {', '.join(ROLES)}"
    )
    parser.add_argument("--model", metavar="M", help="its model [any]")
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="S",
        help="wait for up to S seconds until it has left, sleeps or serves; exit status 1 if not",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    action: str = arguments.action
    takes_role = action == "role"
    if takes_role is not (arguments.serves is not None) or (takes_role and arguments.wait):
        return failed("fleet", f"wrong operands of {action} (see --help)", 2)
    call = {"drain": _drain, "sleep": _sleep, "promote": _promote, "role": _role}[action]

    async def main(bus: Bus) -> int:
        try:
            workers = await chosen_workers(
                bus, settings, arguments.model, arguments.worker, ACTIONS[action]
            )
            failure = await call(bus, settings, workers, arguments)
        except WorkerChoiceError as error:
            failure = str(error)
        if failure:
            print(f"kvmesh fleet: {failure}", file=sys.stderr)
        return 0 if failure is None else 1

    return run_on_bus("fleet", settings, main)


async def _drain(
    bus: Bus, settings: Settings, workers: list[Instance], arguments: argparse.Namespace
) -> str | None:
    """None if the workers obey; else the reason, empty if it is printed. So for all actions."""
    if not await command_workers(bus, workers, Drain(), REPLY_S, "drains"):
        return ""
    instances = {card.instance for card in workers}
    if arguments.wait is None or await _left(bus, settings, instances, arguments.wait):
        return None
    return f"still there after {arguments.wait:g} s"


async def _left(bus: Bus, settings: Settings, instances: set[str], timeout_s: float) -> bool:
    """True once none of the instances has a lease; False after `timeout_s` seconds."""
    directory = Directory(bus, stream_limits(settings.streams))
    await directory.open()
    try:
        async with asyncio.timeout(timeout_s):
            while any(card.instance in instances for card in directory.instances):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    finally:
        await directory.close()
    return True


async def _sleep(
    bus: Bus, settings: Settings, workers: list[Instance], arguments: argparse.Namespace
) -> str | None:
    await _warn_of_last(bus, settings, workers)
    if not await command_workers(bus, workers, Sleep(), REPLY_S, "falls asleep"):
        return ""
    if arguments.wait is None:
        return None
    awake = await await_role(
        bus, settings, workers, Role.PARKED, arguments.wait, lambda _: "asleep"
    )
    return f"not asleep after {arguments.wait:g} s: {', '.join(sorted(awake))}" if awake else None


async def _warn_of_last(bus: Bus, settings: Settings, workers: list[Instance]) -> None:
    """Say for which models nobody serves once these workers sleep."""
    chosen = {card.instance for card in workers}
    for model in sorted({model_of(card) for card in workers}):
        present = await chosen_workers(bus, settings, model, None)
        if not any(c.instance not in chosen and not c.draining for c in present):
            print(f"kvmesh fleet: no other worker serves {model}", file=sys.stderr)


async def _promote(
    bus: Bus, settings: Settings, workers: list[Instance], arguments: argparse.Namespace
) -> str | None:
    if not await command_workers(bus, workers, Promote(), REPLY_S, "starts"):
        return ""
    if arguments.wait is None:
        return None
    missing = await await_role(
        bus,
        settings,
        workers,
        Role.WORKER,
        arguments.wait,
        lambda card: f"serves after {card.promoted_s:.1f} s",
    )
    names = ", ".join(sorted(missing))
    return f"does not serve after {arguments.wait:g} s: {names}" if missing else None


async def _role(
    bus: Bus, settings: Settings, workers: list[Instance], arguments: argparse.Namespace
) -> str | None:
    del settings
    command = Serve(serves=arguments.serves)

    async def send(card: Instance) -> bool:
        reply = await send_command(bus, card, command, ROLE_REPLY_S)
        text = f"serves {command.serves}, before {card.serves}" if reply.ok else reply.reason
        print(f"{card.name}: {text}", file=sys.stdout if reply.ok else sys.stderr)
        return reply.ok

    return None if all(await asyncio.gather(*map(send, workers))) else ""
