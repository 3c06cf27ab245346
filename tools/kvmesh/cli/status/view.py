"""Prints the report of `kvmesh status` as JSON or tables, and the limits of streams."""

import time
from collections.abc import Iterable
from itertools import combinations

import msgspec
from rich.markup import escape
from rich.text import Text

from kvmesh.bus.connection.jetstream import StreamInfo
from kvmesh.bus.discovery.leases import REFUSED_STATE, STATE
from kvmesh.bus.messages import (
    GENERATE,
    Instance,
    Load,
    NodeStore,
    RankSpeed,
    Role,
    WorkerState,
    incompatible_models,
)
from kvmesh.cli.models.aliases import alias_table
from kvmesh.cli.status.report import (
    BucketReport,
    FailedStartReport,
    IdleModelReport,
    InstanceReport,
    MeshReport,
    StartingReport,
    StreamReport,
)
from kvmesh.cli.status.starts import phase_columns, start_rows
from kvmesh.cli.units import literal
from kvmesh.observer.columns import PARTS, sources_text
from kvmesh.runtime.logs import printable
from kvmesh.runtime.quantities import duration, size
from kvmesh.terminal.console import stdout_console
from kvmesh.terminal.tables import FittedTable, columns


def show_json(report: object) -> None:
    """Print the report as one indented JSON object."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


def show_tables(report: MeshReport, all_starts: bool = False) -> None:
    """Print the report as tables, which fit the terminal; whole if standard output is none.

    `all_starts`: with the phases of the starts of running workers.
    """
    console = stdout_console()
    console.print(f"mesh {report.namespace} on NATS {report.server} at {report.nats}")
    starts = _starts(report.starting, report.instances if all_starts else [])
    for table in (
        _instances(report.instances, report.starting),
        *([_idle_models(report.idle_models)] if report.idle_models else []),
        *([alias_table(report.aliases)] if report.aliases else []),
        *([starts] if starts.rows else []),
        _streams(report.streams),
        _readers(report.streams),
        _buckets(report.buckets),
    ):
        console.print()
        if table.rows:
            table.show(console)
        else:
            console.print(f"[dim]no {table.columns[0].heading}s[/dim]")
    if report.failed_starts:
        console.print("\n[red]Failed starts:[/red]")
    for failed in report.failed_starts:
        console.print(escape(_failed(failed)), soft_wrap=True)
    if report.warnings:
        console.print("\n[red]Warnings:[/red]")
    for warning in report.warnings:
        console.print(escape(f"{warning.instance}: {warning.text}"), soft_wrap=True)
    incompatible = _incompatible_layouts(report.instances)
    if incompatible.rows:
        console.print("\n[yellow]These block managers do not share all blocks:[/yellow]")
        incompatible.show(console)
    keys = _keys(report.instances)
    if keys.rows:
        console.print("\n[yellow]Block managers with different keys share no blocks:[/yellow]")
        keys.show(console)


def show_limits(infos: list[StreamInfo]) -> None:
    """Print the streams of a mesh, buckets included, with their limits."""
    headings = ("stream", "storage", "replicas", "messages", "bytes", "max bytes", "max age")
    table = _table(*headings, hide=("storage", "messages"))
    for info in infos:
        config, max_bytes = info.config, info.config.max_bytes or -1
        table.add_row(
            config.name or "",
            str(config.storage),
            str(config.num_replicas),
            str(info.state.messages),
            size(info.state.bytes),
            size(max_bytes) if max_bytes > 0 else "no limit",
            duration(config.max_age) if config.max_age else "no limit",
        )
    table.show(stdout_console())


def _table(*headings: str, hide: Iterable[str] = ()) -> FittedTable:
    return FittedTable(columns(*headings, numbers=_NUMBERS, hide=hide))


_NUMBERS = frozenset(
    {
        "age",
        "messages",
        "bytes",
        "first",
        "last",
        "readers",
        "lag",
        "replicas",
        "max bytes",
        "max age",
    }
)


def _instances(members: list[InstanceReport], starting: list[StartingReport]) -> FittedTable:
    headings = ("instance", "role", "age", "state", "speed", "model", "load", "labels")
    table = _table(*headings, hide=("labels", "speed", "load", "age", "model"))
    for member in members:
        card = member.card
        table.add_row(
            card.instance,
            _role(card),
            duration(member.age_s),
            _state(member),
            Text("; ").join(map(_speed, member.speed)),
            literal(card.model.name if card.model else card.parked_for or ""),
            _tiers(card.store) if card.store else "; ".join(map(_load, member.load)),
            literal(" ".join(f"{key}={value}" for key, value in card.labels.items())),
        )
    for each in starting:
        worker, state = each.worker, Text(f"starting: {printable(each.worker.phase)}", "yellow")
        age = duration(each.age_s)
        table.add_row(worker.instance, Role.WORKER, age, state, "", literal(worker.model))
    return table


def _starts(starting: list[StartingReport], members: list[InstanceReport]) -> FittedTable:
    """Seconds of each phase of the starts."""
    rows = start_rows(starting, members)
    phases = phase_columns(rows)
    parts = {
        part: heading
        for part, heading in PARTS.items()
        if any(each.part == part for row in rows for each in row.sources)
    }
    figures = [*map(printable, phases), "total"]
    wanted = columns("start, in seconds", *figures, *parts.values(), numbers=figures)
    table = FittedTable(wanted, split=True)
    for row in rows:
        origins = (sources_text(row.sources, part) for part in parts)
        total = f"{row.total_s:.1f}"
        table.add_row(row.instance, *map(row.cell, phases), total, *origins)
    return table


def _failed(failed: FailedStartReport) -> str:
    start = failed.start
    when = f"{duration(failed.age_s)} ago, after {start.failed - start.started:.0f} s"
    end = "; it rejects its settings" if start.final else ""
    where = f"in {start.phase} of {start.engine}"
    return printable(f"{start.instance}, {when}, {where}{end}: {start.error}")


def _idle_models(models: list[IdleModelReport]) -> FittedTable:
    table = _table("idle model", "age", "planner", hide=("planner",))
    for model in models:
        table.add_row(model.name, duration(model.age_s), model.planner)
    return table


def _role(card: Instance) -> str:
    role = Role.WORKER if card.state is WorkerState.STANDBY else card.role
    if card.model is not None and card.model.task != GENERATE:
        return f"{card.model.task} {role}"
    return role if card.serves == "aggregated" else f"{card.serves} {role}"


def _state(member: InstanceReport) -> str | Text:
    card = member.card
    if card.state is WorkerState.STANDBY:
        return "asleep" if card.asleep else "parked"
    if card.labels.get(STATE) == REFUSED_STATE:
        return Text("refused", "red")
    if card.state is WorkerState.DRAINING:
        return Text("draining", "yellow")
    if member.reason:
        return Text("incompatible", "red")
    if member.leads:
        return "leads"
    return "ready" if member.eligible else Text(printable(card.labels[STATE]), "yellow")


def _speed(speed: RankSpeed) -> Text:
    """The speed beside that of the other ranks, and since when it is an outlier."""
    if speed.since is None:
        return Text(f"{speed.speed:.1f}×")
    text = f"{speed.speed:.1f}× since {time.strftime('%H:%M', time.localtime(speed.since))}"
    return Text(text, "red" if speed.speed < 1 else "")


def _tiers(store: NodeStore) -> str:
    names = ("memory", "disk", "remote")
    sizes = zip(store.tier_bytes, names, strict=False)
    text = ", ".join(f"{size(count)} of {name}" for count, name in sizes if count)
    return f"{text}, restores before returns: {store.restores}" if store.restores else text


def _incompatible_layouts(members: list[InstanceReport]) -> FittedTable:
    """Layouts of the models for which two nodes have none in common."""
    layouts = {m.card.instance: m.card.store.layouts for m in members if m.card.store}
    pairs = combinations(layouts.values(), 2)
    table = _table("model", "block manager", "layout of its workers")
    for model in sorted(
        {model for ours, theirs in pairs for model in incompatible_models(ours, theirs)}
    ):
        for instance, has in layouts.items():
            for layout in has.get(model, []):
                table.add_row(model, instance, layout)
    return table


def _keys(members: list[InstanceReport]) -> FittedTable:
    """Fingerprints of the block managers' keys, if they differ."""
    keys = {m.card.instance: m.card.store.key for m in members if m.card.store and m.card.store.key}
    table = _table("block manager", "fingerprint of its key")
    for instance, key in keys.items() if len(set(keys.values())) > 1 else ():
        table.add_row(instance, key)
    return table


def _load(load: Load) -> str:
    blocks = f"{load.active_blocks}+{load.cached_blocks} of {load.total_blocks} blocks"
    steps = f", steps of {load.step_s * 1000:.0f} ms" if load.step_s else ""
    return f"{load.running} running, {load.waiting} waiting, {blocks}{steps}"


def _streams(streams: list[StreamReport]) -> FittedTable:
    headings = ("stream", "messages", "bytes", "first", "last", "readers")
    table = _table(*headings, hide=("first", "last"))
    for stream in streams:
        numbers = (stream.first, stream.last, len(stream.readers))
        table.add_row(
            stream.name, str(stream.messages), size(stream.bytes), *(str(n) for n in numbers)
        )
    return table


def _readers(streams: list[StreamReport]) -> FittedTable:
    table = _table("reader", "stream", "lag")
    for stream in streams:
        for reader in stream.readers:
            table.add_row(reader.owner or reader.name, stream.name, str(reader.lag))
    return table


def _buckets(buckets: list[BucketReport]) -> FittedTable:
    table = _table("bucket", "kind", "messages", "bytes")
    for bucket in buckets:
        table.add_row(bucket.name, bucket.kind, str(bucket.messages), size(bucket.bytes))
    return table
