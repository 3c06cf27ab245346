"""`kvmesh keys`: the API keys that are kept in the mesh."""

import argparse
import sys
import time

import msgspec

from kvmesh.bus.buckets import keys_bucket, read_bucket
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import Conflict, NotFound
from kvmesh.bus.jetstream import Bucket, Entry
from kvmesh.bus.subjects import token
from kvmesh.cli import keyring
from kvmesh.cli.bus_session import run_on_bus
from kvmesh.cli.keyring import KeyringError
from kvmesh.frontend.auth.accounts import Key
from kvmesh.settings import Settings

ACTIONS = ("add", "list", "revoke", "rotate")
GRACE = "1h"


class Refusal(Exception):
    """The bucket does not hold what the action needs."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh keys add|list|revoke|rotate [NAME] [options]"
    parser.epilog = (
        "A new secret is shown once; the mesh has only its hash. Frontends with"
        " frontend.keys_bucket follow within a second."
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("name", nargs="?", metavar="NAME", help="the key's name; not for list")
    for field, metavar in keyring.options():
        flag = f"--{field.replace('_', '-')}"
        parser.add_argument(
            flag, dest=f"key_{field}", metavar=metavar, help=f"`{field}` of a key to add"
        )
    parser.add_argument(
        "--grace", metavar="TIME", help=f"how long a rotated secret stays good ({GRACE}; 0s: not)"
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
        new = keyring.made(arguments.name or "", secret, given, now)
    except (KeyringError, ValueError) as error:
        print(f"kvmesh keys: {error}", file=sys.stderr)
        return 2

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
        except Refusal as refusal:
            print(f"kvmesh keys: {refusal}", file=sys.stderr)
            return 1
        return 0

    return run_on_bus("keys", settings, main)


def _check(arguments: argparse.Namespace, given: dict[str, str]) -> None:
    action = arguments.action
    if (arguments.name is None) != (action == "list"):
        raise KeyringError(f"{action} takes {'no name' if action == 'list' else 'a name'}")
    if given and action != "add":
        raise KeyringError(f"{action} changes no fields; revoke the key and add it anew")
    if arguments.grace is not None and action != "rotate":
        raise KeyringError("--grace is for rotate")


async def _add(bucket: Bucket, key: Key) -> None:
    try:
        await bucket.create(token(key.name), msgspec.json.encode(key))
    except Conflict:
        raise Refusal(f"there is a key {key.name}; rotate gives it a new secret") from None


async def _rotate(bucket: Bucket, name: str, secret: str, until: float) -> Key:
    entry = await _entry(bucket, name)
    try:
        held = msgspec.json.decode(entry.value or b"", type=Key)
    except msgspec.MsgspecError as error:
        raise Refusal(f"the key {name} cannot be read: {error}") from error
    key = keyring.rotated(held, secret, until)
    try:
        await bucket.update(token(name), msgspec.json.encode(key), last=entry.revision)
    except Conflict:
        raise Refusal(f"somebody else has just changed the key {name}") from None
    return key


async def _revoke(bucket: Bucket, name: str) -> None:
    await _entry(bucket, name)
    await bucket.delete(token(name))
    print(f"revoked {name}")


async def _entry(bucket: Bucket, name: str) -> Entry:
    try:
        return await bucket.get(token(name))
    except NotFound:
        raise Refusal(f"there is no key {name}") from None


async def _list(bus: Bus, now: float) -> None:
    found = await read_bucket(bus, bus.subjects.keys_bucket)
    for name, value in sorted(found.items()):
        try:
            told = keyring.row(msgspec.json.decode(value, type=Key), now)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            print(f"{name}: cannot be read, and lets nobody in: {error}")
            continue
        first = told.pop("name")
        print(f"{first}: " + ", ".join(f"{field} {text}" for field, text in told.items()))
    if not found:
        print("no keys")


def _show(key: Key, secret: str) -> None:
    if key.old_sha256 is not None and key.old_until > time.time():
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(key.old_until))
        print(f"the secret before it is good until {until}", file=sys.stderr)
    print(f"the secret of {key.name}, which is shown only now:", file=sys.stderr)
    print(secret)
