"""`kvmesh backup` and `kvmesh backup restore` between real meshes."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.up import Up
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import Conflict
from kvmesh.bus.storage.buckets import write_once_bucket
from kvmesh.bus.streams.configuration import ensure_stream
from kvmesh.cli.backups.archive import ArchiveError
from kvmesh.cli.backups.store import back_up, restore

ONLY_NATS = ("--workers", "0", "--routers", "0", "--indexers", "0", "--frontends", "0")


def run(up: Up, *arguments: str) -> str:
    result = up.command(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def respond(up: Up, key: str, **body: object) -> dict[str, object]:
    content = json.dumps({"model": "chat", "max_output_tokens": 16, **body}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{up.url}/v1/responses", content, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        found: dict[str, object] = json.load(response)
        return found


def has_alias(up: Up, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{up.url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return '"chat"' in response.read().decode()
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        return False  # the frontend has yet to hear of the key


async def test_another_mesh_goes_on_where_the_first_was(tmp_path: Path) -> None:
    file = tmp_path / "mesh.zip"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = Up(tmp_path / "one", "--workers", "1", "--frontend-keys-bucket")
    try:
        first.start()
        await first.ready()
        key = run(first, "keys", "add", "team", "--tenant", "blue").split()[0]
        run(first, "model", "alias", "chat=kvmesh-demo")
        await eventually(lambda: has_alias(first, key))
        answer = respond(first, key, input="Hello")
        output = run(first, "backup", "save", str(file))
        assert "all checked" in output
    finally:
        first.close()
    empty = Up(tmp_path / "two", *ONLY_NATS)
    try:
        empty.start()
        await eventually(lambda: "ready after" in empty.output)
        assert "all of the backup are in the mesh" in run(empty, "backup", "restore", str(file))
    finally:
        empty.close()
    second = Up(tmp_path / "two", "--workers", "1", "--frontend-keys-bucket")
    try:
        second.start()
        await second.ready()
        await eventually(lambda: has_alias(second, key))
        continued = respond(second, key, input="And?", previous_response_id=answer["id"])
        assert continued["previous_response_id"] == answer["id"]
        assert "0 values stored" in run(second, "backup", "restore", str(file))
    finally:
        second.close()


async def test_what_differs_is_kept_unless_it_is_to_be_replaced(bus: Bus, tmp_path: Path) -> None:
    plan = bus.bucket(bus.subjects.plan_bucket)
    await plan.put("settings", b"old")
    file = tmp_path / "mesh.zip"
    await back_up(bus, file)
    await plan.put("settings", b"new")
    with pytest.raises(ArchiveError, match=r"1 values of the mesh differ, such as plan/settings"):
        await restore(bus, file, replace=False)
    assert (await plan.get("settings")).value == b"new"
    assert await restore(bus, file, replace=True) == {"plan": 1}
    assert (await plan.get("settings")).value == b"old"


async def test_the_fleet_and_rolls_of_another_hour_are_left_out(bus: Bus, tmp_path: Path) -> None:
    plan = bus.bucket(bus.subjects.plan_bucket)
    for key in ("desired", "report", "replacement", "replaced", "roll.worker", "alias.chat"):
        await plan.put(key, b"{}")
    manifest = await back_up(bus, tmp_path / "mesh.zip")
    assert [entry.key for entry in manifest.values if entry.bucket == "plan"] == ["alias.chat"]


async def test_another_secret_is_refused_before_anything_is_stored(
    bus: Bus, tmp_path: Path
) -> None:
    plan = bus.bucket(bus.subjects.plan_bucket)
    await plan.put("settings", b"old")
    bucket = write_once_bucket(bus, bus.subjects.secrets_bucket)
    await ensure_stream(bus, bus.specs[f"KV_{bus.subjects.secrets_bucket}"])
    await bucket.create("tenants", b"1" * 32)
    file = tmp_path / "mesh.zip"
    await back_up(bus, file)
    await plan.put("settings", b"new")
    await bus.js.context.delete_stream(f"KV_{bus.subjects.secrets_bucket}")
    await ensure_stream(bus, bus.specs[f"KV_{bus.subjects.secrets_bucket}"])
    await bucket.create("tenants", b"2" * 32)
    with pytest.raises(ArchiveError, match="secrets/tenants, which is written once"):
        await restore(bus, file, replace=True)
    assert (await plan.get("settings")).value == b"new"
    with pytest.raises(Conflict):
        await bucket.create("tenants", b"1" * 32)
