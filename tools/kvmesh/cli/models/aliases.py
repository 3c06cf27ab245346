"""Aliases of models: set, go back, remove, and compare their models."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import AliasTarget, MessageDecoder, ModelAlias, Outcome, encode
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.cli.arguments import failed
from kvmesh.cli.rolling.figures import OutcomeLog
from kvmesh.cli.rolling.platforms import caller
from kvmesh.observer.route_stream import each_outcome
from kvmesh.terminal.tables import FittedTable, columns

WINDOW = timedelta(minutes=15)
HEADINGS = ("alias", "model", "share", "requests", "failed", "ttft p50", "p90", "cached")
HIDE = ("p90", "cached", "requests")
_aliases = MessageDecoder(ModelAlias)


class AliasError(Exception):
    """A definition of an alias that cannot be used; the message says why."""


class TargetUse(msgspec.Struct, kw_only=True):
    """A model of an alias: its share of the sessions, and its requests under this alias.

    `shadow`: it gets copies of this share of the sessions, and clients no answers of it.
    """

    model: str
    share: float
    requests: int = 0
    failed: int = 0
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    cached_share: float | None = None
    shadow: bool = False


class AliasUse(msgspec.Struct, kw_only=True):
    """An alias with the use of its models in the last WINDOW."""

    name: str
    by: str
    time: float
    before: list[AliasTarget]
    models: list[TargetUse]


def parse_alias(text: str, shadows: Iterable[str] = ()) -> ModelAlias:
    """An alias from `NAME=MODEL[:WEIGHT],…` and shadows as `MODEL:PERCENT`; raises AliasError."""
    name, equals, targets = text.partition("=")
    if not name or not equals or not targets:
        raise AliasError(f"{text!r} is not NAME=MODEL[:WEIGHT],…")
    found = [_target(part) for part in targets.split(",")]
    if not any(target.weight for target in found):
        raise AliasError(f"{text!r} gives no model a weight")
    if len({target.model for target in found}) < len(found):
        raise AliasError(f"{text!r} names a model twice")
    copied = [_shadow(text) for text in shadows]
    if len({shadow.model for shadow in copied}) < len(copied):
        raise AliasError("a shadow is named twice")
    for shadow in copied:
        if any(target.model == shadow.model and target.weight for target in found):
            raise AliasError(f"{shadow.model} serves the alias already, and cannot be its shadow")
    return ModelAlias(name=name, targets=found, shadows=copied)


def _shadow(text: str) -> AliasTarget:
    if ":" not in text:
        raise AliasError(f"{text!r} is not MODEL:PERCENT")
    shadow = _target(text)
    if not 0 < shadow.weight <= 100:
        raise AliasError(f"{text!r}: a shadow gets more than 0 and at most 100 percent of sessions")
    return shadow


def _target(text: str) -> AliasTarget:
    model, colon, weight = text.rpartition(":")
    if not colon:
        model, weight = text, "1"
    try:
        number = float(weight)
    except ValueError:
        raise AliasError(f"{weight!r} is no weight of a model") from None
    if not model or not 0 <= number < float("inf"):
        raise AliasError(f"{text!r} is not MODEL[:WEIGHT] with a weight of 0 or more")
    return AliasTarget(model, number)


async def set_alias(bus: Bus, alias: ModelAlias, served: Iterable[str]) -> int:
    """Store an alias; warns of models that nobody serves."""
    present = (await _stored(bus)).get(alias.name)
    if present is None:
        await _store(bus, alias)
    elif (present.targets, present.shadows) != (alias.targets, alias.shadows):
        # to set the same again leaves the way back
        await _store(bus, _after(alias, present))
    for target in (*alias.targets, *alias.shadows):
        if target.model not in served:
            print(f"kvmesh model: nobody serves {target.model} now", file=sys.stderr)
    return 0


async def go_back(bus: Bus, name: str) -> int:
    """Give an alias the targets that it had before its last change, or remove it."""
    present = (await _stored(bus)).get(name)
    if present is None:
        return failed("model", f"no alias is called {name}")
    if not present.before:
        return await remove_alias(bus, name)
    earlier = ModelAlias(name=name, targets=present.before, shadows=present.shadows_before)
    await _store(bus, _after(earlier, present))
    return 0


def _after(alias: ModelAlias, present: ModelAlias) -> ModelAlias:
    """An alias with the way back to what it is now."""
    return msgspec.structs.replace(alias, before=present.targets, shadows_before=present.shadows)


async def remove_alias(bus: Bus, name: str) -> int:
    """Remove an alias."""
    if name not in await _stored(bus):
        return failed("model", f"no alias is called {name}")
    await bus.bucket(bus.subjects.plan_bucket).delete(bus.subjects.alias_key(name))
    print(f"{name} is no alias any more")
    return 0


async def _store(bus: Bus, alias: ModelAlias) -> None:
    alias = msgspec.structs.replace(alias, by=caller(), time=time.time())
    await bus.bucket(bus.subjects.plan_bucket).put(
        bus.subjects.alias_key(alias.name), encode(alias)
    )
    shadows = f", shadowed by {targets_text(alias.shadows)} %" if alias.shadows else ""
    print(f"{alias.name} is {targets_text(alias.targets)}{shadows}")


def targets_text(targets: Iterable[AliasTarget]) -> str:
    """The models of an alias with their weights, as they are entered."""
    return ",".join(f"{target.model}:{target.weight:g}" for target in targets)


async def _stored(bus: Bus) -> dict[str, ModelAlias]:
    entries = await read_bucket(bus, bus.subjects.plan_bucket, "alias.*")
    found = {}
    for value in entries.values():
        with suppress(msgspec.MsgspecError):
            alias = _aliases.decode(value)
            found[alias.name] = alias
    return found


async def used_aliases(bus: Bus) -> list[AliasUse]:
    """All aliases, with the requests of the last WINDOW; raises BusError."""
    with suppress(NotFound):
        stored = await _stored(bus)
        return await _compared(bus, stored) if stored else []
    return []


async def _compared(bus: Bus, stored: dict[str, ModelAlias]) -> list[AliasUse]:
    logs: dict[tuple[str, str, bool], OutcomeLog] = {}
    tokens: dict[tuple[str, str, bool], list[int]] = {}

    def count(outcome: Outcome) -> None:
        if outcome.alias in stored:
            key = (outcome.alias, outcome.model, outcome.shadow)
            logs.setdefault(key, OutcomeLog()).add(outcome)
            sums = tokens.setdefault(key, [0, 0])
            sums[0] += outcome.cached_tokens
            sums[1] += outcome.prompt_tokens

    await each_outcome(bus, datetime.now(UTC) - WINDOW, count)
    return [
        AliasUse(
            name=alias.name,
            by=alias.by,
            time=alias.time,
            before=alias.before,
            models=[
                _use(alias.name, target, share, shadow, logs, tokens)
                for target, share, shadow in _shares(alias)
            ],
        )
        for alias in sorted(stored.values(), key=lambda alias: alias.name)
    ]


def _shares(alias: ModelAlias) -> Iterator[tuple[AliasTarget, float, bool]]:
    """Each model with its share of the sessions, and whether it is a shadow."""
    whole = sum(each.weight for each in alias.targets)
    yield from ((target, target.weight / whole, False) for target in alias.targets)
    yield from ((shadow, shadow.weight / 100, True) for shadow in alias.shadows)


def _use(
    alias: str,
    target: AliasTarget,
    share: float,
    shadow: bool,
    logs: dict[tuple[str, str, bool], OutcomeLog],
    tokens: dict[tuple[str, str, bool], list[int]],
) -> TargetUse:
    key = (alias, target.model, shadow)
    figures = logs.get(key, OutcomeLog()).between(0.0, float("inf"))
    cached, prompt = tokens.get(key, (0, 0))
    return TargetUse(
        model=target.model,
        share=share,
        requests=figures.requests,
        failed=figures.failed,
        ttft_p50_s=figures.p50_s,
        ttft_p90_s=figures.p90_s,
        cached_share=cached / prompt if prompt else None,
        shadow=shadow,
    )


def alias_table(uses: Iterable[AliasUse]) -> FittedTable:
    """The models of each alias side by side."""
    table = FittedTable(columns(*HEADINGS, numbers=HEADINGS[2:], hide=HIDE))
    for use in uses:
        for model in use.models:
            table.add_row(
                use.name,
                model.model,
                f"{model.share:.1%}{' copied' if model.shadow else ''}",
                str(model.requests),
                str(model.failed),
                "" if model.ttft_p50_s is None else f"{model.ttft_p50_s:.3f} s",
                "" if model.ttft_p90_s is None else f"{model.ttft_p90_s:.3f} s",
                "" if model.cached_share is None else f"{model.cached_share:.1%}",
            )
    return table
