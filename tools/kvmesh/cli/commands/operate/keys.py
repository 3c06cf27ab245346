"""`kvmesh keys`: manages the API keys stored in the mesh."""

import argparse
import sys
import time

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket, Entry
from kvmesh.bus.errors import Conflict, NotFound
from kvmesh.bus.storage.buckets import keys_bucket, read_bucket
from kvmesh.bus.subjects import token
from kvmesh.cli import keyring
from kvmesh.cli.arguments import failed
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.keyring import KeyringError
from kvmesh.frontend.auth.accounts import Key
from kvmesh.settings import Settings

ACTIONS = ("add", "list", "revoke", "rotate")
GRACE = "1h"


class KeyActionError(Exception):
    """The action cannot be done: no such key, an existing one, or a concurrent change."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh keys add|list|revoke|rotate [NAME] [options]"
    parser.epilog = (
        "A new secret is shown once; the mesh stores only its hash. Frontends with"
        " frontend.keys_bucket apply changes within a second."
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("name", nargs="?", metavar="NAME", help="the key's name; not for list")
    for field, metavar in keyring.options():
        flag = f"--{field.replace('_', '-')}"
        parser.add_argument(
            flag, dest=f"key_{field}", metavar=metavar, help=f"`{field}` of a key to add"
        )
    parser.add_argument(
        "--grace", metavar="TIME", help=f"time for which the old secret stays valid ({GRACE})"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    given = {
        name: value
        for name, _ in keyring.options()
        if (value := getattr(arguments, f"key_{name}")) is not None
    }
    try:
        _check(arguments, given)
        grace = keyring.seconds(arguments.grace or GRACE)
        secret, now = keyring.new_secret(), time.time()
        new = keyring.make_key(arguments.name or "", secret, given, now)
    except (KeyringError, ValueError) as error:
        return failed("keys", error, 2)

    async def main(bus: Bus) -> int:
        bucket = await keys_bucket(bus)
        try:
            match arguments.action:
                case "list":
                    await _list(bus, now)
                case "add":
                    await _add(bucket, new)
                    _show(new, secret)
                case "rotate":
                    key = await _rotate(bucket, arguments.name, secret, now + grace)
                    _show(key, secret)
                case _:
                    await _revoke(bucket, arguments.name)
        except KeyActionError as error:
            return failed("keys", error)
        return 0

    return run_on_bus("keys", settings, main)


def _check(arguments: argparse.Namespace, given: dict[str, str]) -> None:
    action = arguments.action
    if (arguments.name is None) != (action == "list"):
        raise KeyringError(f"{action} takes {'no name' if action == 'list' else 'a name'}")
    if given and action != "add":
        raise KeyringError(f"{action} cannot set fields; revoke the key and add it again")
    if arguments.grace is not None and action != "rotate":
        raise KeyringError("--grace applies to rotate only")


async def _add(bucket: Bucket, key: Key) -> None:
    try:
        await bucket.create(token(key.name), msgspec.json.encode(key))
    except Conflict:
        raise KeyActionError(f"key {key.name} exists; rotate gives it a new secret") from None


async def _rotate(bucket: Bucket, name: str, secret: str, until: float) -> Key:
    entry = await _entry(bucket, name)
    try:
        stored = msgspec.json.decode(entry.value or b"", type=Key)
    except msgspec.MsgspecError as error:
        raise KeyActionError(f"cannot decode key {name}: {error}") from error
    key = keyring.rotate(stored, secret, until)
    try:
        await bucket.update(token(name), msgspec.json.encode(key), last=entry.revision)
    except Conflict:
        raise KeyActionError(f"key {name} was changed concurrently; try again") from None
    return key


async def _revoke(bucket: Bucket, name: str) -> None:
    await _entry(bucket, name)
    await bucket.delete(token(name))
    print(f"revoked {name}")


async def _entry(bucket: Bucket, name: str) -> Entry:
    try:
        return await bucket.get(token(name))
    except NotFound:
        raise KeyActionError(f"no key named {name}") from None


async def _list(bus: Bus, now: float) -> None:
    found = await read_bucket(bus, bus.subjects.keys_bucket)
    for name, value in sorted(found.items()):
        try:
            shown = keyring.fields_shown(msgspec.json.decode(value, type=Key), now)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            print(f"{name}: undecodable, grants no access: {error}")
            continue
        first = shown.pop("name")
        print(f"{first}: " + ", ".join(f"{field} {text}" for field, text in shown.items()))
    if not found:
        print("no keys")


def _show(key: Key, secret: str) -> None:
    if key.old_sha256 is not None and key.old_until > time.time():
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(key.old_until))
        print(f"the old secret is valid until {until}", file=sys.stderr)
    print(f"secret of {key.name}, shown only once:", file=sys.stderr)
    print(secret)
