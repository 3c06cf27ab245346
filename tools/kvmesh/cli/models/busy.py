"""`kvmesh model busy`: shows or sets the load thresholds above which ranks get no requests."""

import argparse
import sys

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import Thresholds, encode
from kvmesh.cli.arguments import failed
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.flags import did_you_mean
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

SETTINGS_APPLY = "the routers' settings apply"


def busy(arguments: argparse.Namespace, model: str, settings: Settings) -> int:
    """Show, set or reset a model's thresholds; the exit status."""
    wanted = Thresholds(
        blocks=arguments.blocks,
        blocks_share=arguments.blocks_share,
        prefill_tokens=arguments.prefill_tokens,
    )
    reason = _problem(wanted, arguments.reset)
    if reason:
        return failed("model", reason, 2)

    async def main(bus: Bus) -> int:
        bucket = await bus.js.key_value(bus.subjects.router_bucket)
        key = bus.subjects.busy_key(model)
        stored = await _stored(bucket, key)
        doubt = await _doubt(bus, settings, model)
        if doubt and stored is None and wanted != Thresholds():
            return failed("model", f"nothing was stored: {doubt}")
        if doubt:
            print(f"kvmesh model: {doubt}", file=sys.stderr)
        if arguments.reset:
            await bucket.delete(key)
            stored = None
        elif wanted != Thresholds():
            await bucket.put(key, encode(wanted))
            stored = wanted
        print(f"{model}: {_text(stored) if stored else SETTINGS_APPLY}")
        return 0

    return run_on_bus("model", settings, main)


def _problem(wanted: Thresholds, reset: bool) -> str:
    """The reason why the thresholds are invalid; empty if they are valid."""
    if reset and wanted != Thresholds():
        return "--reset cannot be combined with thresholds"
    share = wanted.blocks_share
    if share is not None and not 0 < share <= 1:
        return f"--blocks-share {share:g} must be above 0 and at most 1"
    for flag, value in (("blocks", wanted.blocks), ("prefill-tokens", wanted.prefill_tokens)):
        if value is not None and value < 1:
            return f"--{flag} {value} must be at least 1"
    return ""


async def _stored(bucket: Bucket, key: str) -> Thresholds | None:
    try:
        return msgspec.msgpack.decode((await bucket.get(key)).value or b"", type=Thresholds)
    except NotFound:
        return None


async def _doubt(bus: Bus, settings: Settings, model: str) -> str:
    """The reason to doubt the model's name; empty if a worker serves it or it is an idle model."""
    directory = Directory(bus, stream_limits(settings.streams))
    await directory.open()
    served = {card.model.name for card in directory.instances if card.model is not None}
    await directory.close()
    if model in served:
        return ""
    plan = await bus.js.key_value(bus.subjects.plan_bucket)
    try:
        await plan.get(bus.subjects.idle_key(model))
    except NotFound:
        return f"no worker serves {model} now{did_you_mean(model, served)}"
    return ""


def _text(thresholds: Thresholds) -> str:
    named = [
        (name.replace("_", "-"), getattr(thresholds, name)) for name in thresholds.__struct_fields__
    ]
    return ", ".join(f"{name} {value:g}" for name, value in named if value is not None)
