"""`kvmesh plan set`: changes the planner's settings at run time."""

import argparse
from contextlib import suppress
from typing import Any

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import Conflict, NotFound
from kvmesh.cli.arguments import failed
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.planner.config import CHANGEABLE, plan_options, with_changes
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.settings import Settings

HELP = "show or change the planner's settings at run time"
_settings = msgspec.json.Decoder(dict[str, Any])
LISTS = ("pools", "ttft", "itl", "queue")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh plan set [KEY=VALUE …] [options]"
    parser.epilog = (
        f"Keys: {', '.join(CHANGEABLE)}. A list has commas: ttft=p95=2s,batch:p90=1m. An empty"
        " value restores the planner's own setting. Changes survive restarts of planners."
    )
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="the new values")
    parser.add_argument("--reset", action="store_true", help="restore the planner's own settings")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        wanted = dict(_pair(text) for text in arguments.changes)
        _check(settings, wanted)
    except PlannerConfigError as error:
        return failed("plan set", error, 2)
    if arguments.reset and wanted:
        return failed("plan set", "--reset excludes new values", 2)

    async def change(bus: Bus) -> int:
        bucket = await bus.js.key_value(bus.subjects.plan_bucket)
        key = bus.subjects.plan_settings_key
        if arguments.reset:
            await bucket.delete(key)
            print("the planners' own settings apply")
            return 0
        present: dict[str, Any] = {}
        last = 0
        with suppress(NotFound, msgspec.MsgspecError):  # a malformed entry is replaced
            entry = await bucket.get(key)
            last = entry.revision or 0
            present = _settings.decode(entry.value or b"{}")
        changed = {k: v for k, v in {**present, **wanted}.items() if v}
        if wanted:
            try:
                _check(settings, changed)
            except PlannerConfigError as error:
                return failed("plan set", error, 2)
            try:
                if last:
                    await bucket.update(key, msgspec.json.encode(changed), last=last)
                else:
                    await bucket.create(key, msgspec.json.encode(changed))
            except Conflict:
                return failed("plan set", "changed concurrently; try again")
        for name, value in changed.items():
            print(f"{name} = {','.join(value) if isinstance(value, list) else value}")
        if not changed:
            print("the planners' own settings apply")
        return 0

    return run_on_bus("plan set", settings, change)


def _check(settings: Settings, changes: dict[str, Any]) -> None:
    """Raise PlannerConfigError for invalid or contradicting values.

    The planner checks them again, since its own settings may be others than those here.
    """
    plan_options(with_changes(settings.planner, {k: v for k, v in changes.items() if v}))


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.replace("-", "_")
    if not equals or key not in CHANGEABLE:
        raise PlannerConfigError(
            f"{text!r}: expected KEY=VALUE; the keys are {', '.join(CHANGEABLE)}"
        )
    if key in LISTS:
        return key, [part for part in value.split(",") if part]
    return key, value
