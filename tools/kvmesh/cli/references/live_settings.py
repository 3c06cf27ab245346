"""Settings of a running mesh: change them, wait until they are applied, and list the changes."""

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.discovery.changed_settings import LABEL
from kvmesh.bus.errors import Conflict, NotFound
from kvmesh.bus.messages import (
    ChangedSettings,
    Instance,
    MessageDecoder,
    Role,
    SettingChange,
    encode,
)
from kvmesh.cli.arguments import failed
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.rolling.platforms import caller
from kvmesh.router.config import check_settings
from kvmesh.router.errors import RouterConfigError
from kvmesh.settings import Settings, SettingsError
from kvmesh.settings.live import LiveSection, live_option, with_own_sections
from kvmesh.settings.schema import RouterSettings, Section
from kvmesh.terminal.console import stdout_console
from kvmesh.terminal.tables import FittedTable, columns

LIVE_SECTIONS = ("frontend", "router")
MOST_CHANGES = 100  # of a section, that are kept
APPLIED_S, LOOK_S = 5.0, 0.1
TRIES = 5
_stored: MessageDecoder[ChangedSettings] = MessageDecoder(ChangedSettings)


def change(names: Iterable[str], unset: bool, settings: Settings) -> int:
    """Change settings, or unset them; status 1 if a process does not apply it in time."""
    try:
        wanted = dict(_parsed(name, unset, settings) for name in names)
    except SettingsError as error:
        return failed("config", error, 2)

    async def main(bus: Bus) -> int:
        by_section: dict[str, dict[str, str | None]] = defaultdict(dict)
        for name, text in wanted.items():
            by_section[name.partition(".")[0]][name] = text
        late = 0
        for section, texts in by_section.items():
            try:
                revision = await _store(bus, section, texts, settings)
            except SettingsError as error:
                return failed("config", f"nothing was changed in {section}: {error}")
            for name, text in texts.items():
                print(f"{name} is {'that of each start' if text is None else text}")
            late += await _report(bus, section, revision)
        return 1 if late else 0

    return run_on_bus("config", settings, main)


def _parsed(name: str, unset: bool, settings: Settings) -> tuple[str, str | None]:
    """Name and text of a setting; raises SettingsError."""
    name, equals, text = name.partition("=")
    option = live_option(name)
    if unset:
        if equals:
            raise SettingsError(name, "`unset` takes no value")
        return name, None
    if not equals:
        raise SettingsError(name, "give its value: NAME=VALUE")
    LiveSection(option.section, _section(settings, option.section)).apply({name: text})
    return name, text


def _section(settings: Settings, name: str) -> Section:
    section: Section = getattr(with_own_sections(settings), name)
    return section


def _check(section: Section) -> None:
    if isinstance(section, RouterSettings):
        try:
            check_settings(section)
        except RouterConfigError as error:
            raise SettingsError(f"router.{error.key}", error.reason) from error


async def _store(
    bus: Bus, section: str, texts: Mapping[str, str | None], settings: Settings
) -> int:
    """Store changes beside those of others; returns their revision."""
    bucket = bus.bucket(bus.subjects.config_bucket(section))
    key, now, by = bus.subjects.config_key(section), time.time(), caller()
    new = [SettingChange(name=name, value=text, by=by, time=now) for name, text in texts.items()]
    for _ in range(TRIES):
        present, revision = await _read(bus, section)
        values = {**present.values, **{n: text for n, text in texts.items() if text is not None}}
        for name, text in texts.items():
            if text is None:
                values.pop(name, None)
        LiveSection(section, _section(settings, section), _check).apply(values)
        changes = [*present.changes, *new][-MOST_CHANGES:]
        data = encode(ChangedSettings(values=values, changes=changes))
        try:
            if revision is None:
                return await bucket.create(key, data)
            return await bucket.update(key, data, last=revision)
        except Conflict:
            continue  # somebody else has changed another one just now
    raise SettingsError(section, "others change its settings at the same time: try again")


async def _read(bus: Bus, section: str) -> tuple[ChangedSettings, int | None]:
    try:
        bucket = bus.bucket(bus.subjects.config_bucket(section))
        found = await bucket.get(bus.subjects.config_key(section))
        return _stored.decode(found.value or b""), found.revision
    except NotFound:
        return ChangedSettings(values={}), None
    except msgspec.MsgspecError as error:
        raise SettingsError(section, f"its stored changes cannot be read: {error}") from error


async def _report(bus: Bus, section: str, revision: int) -> int:
    """Say which processes have applied a revision, once all have or APPLIED_S are over."""
    role = Role(section)
    deadline = asyncio.get_running_loop().time() + APPLIED_S
    while True:
        cards = await read_cards(bus, role)
        late = [card for card in cards if _applied(card) < revision]
        if not late or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(LOOK_S)
    done = len(cards) - len(late)
    print(f"applied by {done} of {len(cards)} {section}s")
    for card in late:
        reason = "its log may say why" if _applied(card) else "it may be of an earlier release"
        print(f"kvmesh config: {card.instance} has not applied it: {reason}", file=sys.stderr)
    return len(late)


def _applied(card: Instance) -> int:
    text = card.labels.get(LABEL, "0")
    return int(text) if text.isdecimal() else 0


def show_changes(settings: Settings) -> int:
    """Print the changed settings, and by whom and when they were changed."""

    async def main(bus: Bus) -> int:
        found = [await _read(bus, section) for section in LIVE_SECTIONS]
        values = {name: text for stored, _ in found for name, text in stored.values.items()}
        for name, text in sorted(values.items()):
            print(f"{name} = {text}")
        changes = sorted((c for stored, _ in found for c in stored.changes), key=lambda c: c.time)
        if not changes:
            print("no setting was changed")
            return 0
        table = FittedTable(columns("time", "by", "setting", "value", hide=("by",)))
        for each in changes:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time))
            table.add_row(at, each.by, each.name, "unset" if each.value is None else each.value)
        table.show(stdout_console())
        return 0

    return run_on_bus("config", settings, main)
