"""Callers' cache hints take effect in the engines of a whole mesh."""

import json
import secrets
import urllib.request
from typing import Any

from support.frontend import MODEL
from support.mesh import Mesh
from support.wait import PATIENCE_S

BLOCK = 16
TAIL = "What only this session has said, in many words. " * 12


def call(mesh: Mesh, path: str, method: str = "POST", **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        mesh.url + path,
        json.dumps({"model": MODEL, **body}).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


class Agent:
    """A session that always goes to the same worker."""

    def __init__(self, mesh: Mesh, shared: str, worker: str | None = None) -> None:
        self.session = secrets.token_hex(4)
        self.messages = [
            {"role": "system", "content": shared},
            {"role": "user", "content": f"I am {self.session}. {TAIL}"},
        ]
        self._mesh = mesh
        self.worker = worker

    def turn(self) -> int:
        """Send the prompt again; returns the cached tokens."""
        nvext: dict[str, Any] = {
            "session_control": {"session_id": self.session},
            "extra_fields": ["worker_id"],
            "backend_instance_id": self.worker,
        }
        made = call(
            self._mesh, "/v1/chat/completions", messages=self.messages, max_tokens=4, nvext=nvext
        )
        self.worker = made["nvext"]["worker_id"]["instance"]
        return int(made["usage"]["prompt_tokens_details"]["cached_tokens"])


def pair(mesh: Mesh) -> tuple[Agent, Agent]:
    """Two sessions on one worker with a prefix in common."""
    shared = f"You are one of team {secrets.token_hex(8)}. " + "Work together. " * 40
    first = Agent(mesh, shared)
    assert first.turn() == 0
    return first, Agent(mesh, shared, first.worker)


def test_a_released_session_drops_only_blocks_that_no_other_shares(mesh: Mesh) -> None:
    one, other = pair(mesh)
    prefix = other.turn()
    assert prefix > 100
    whole = other.turn()
    assert whole > prefix
    released = call(mesh, "/v1/sessions/release", sessions=[one.session])
    assert released["blocks"] > 0
    assert other.turn() == whole
    assert one.turn() == prefix
    call(mesh, "/v1/sessions/release", sessions=[one.session, "unknown"])
    assert call(mesh, "/v1/sessions/release", sessions=[one.session])["blocks"] == 0


def test_pins_hold_released_blocks_until_they_are_deleted(mesh: Mesh) -> None:
    one, _ = pair(mesh)
    pin = call(mesh, "/v1/cache/pins", messages=one.messages, ttl="10m")
    assert pin["affected"] == pin["requested"]
    call(mesh, "/v1/sessions/release", sessions=[one.session])
    # engines always compute a prompt's last token, with its whole block if it is in one
    assert one.turn() >= (pin["requested"] - 1) * BLOCK
    gone = call(mesh, "/v1/cache/pins", "DELETE", messages=one.messages)
    assert gone["affected"] == pin["requested"]


def test_a_namespace_is_cleared_alone(mesh: Mesh) -> None:
    one, _ = pair(mesh)
    held = one.turn()
    other = {"X-Tenant-Id": "nobody", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{mesh.url}/v1/cache/clear", json.dumps({"model": MODEL}).encode(), other
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["blocks"] == 0
    assert one.turn() == held > 0
    assert call(mesh, "/v1/cache/clear")["blocks"] > 0
    assert one.turn() == 0
