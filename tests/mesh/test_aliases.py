"""`kvmesh model alias`: several models under one name, in a running mesh."""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from support import forks
from support.up import Up
from support.wait import PATIENCE_S, eventually

SESSIONS = [f"session-{number}" for number in range(24)]
BODY: dict[str, object] = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), "--workers", "1")
    up.start()
    yield up
    up.close()


def other_worker(up: Up) -> forks.Process:
    mesh = ("--nats", up.nats_url, "--nats-token-file", str(up.token_file))
    arguments = ["worker", "--name", "other-0", "--served-name", "other", *mesh]
    with (up.folder / "other.log").open("wb") as log:
        return forks.start(arguments, os.environ, log, log)


def get(up: Up, path: str) -> dict[str, object]:
    with urllib.request.urlopen(up.url + path, timeout=PATIENCE_S) as response:
        found: dict[str, object] = json.load(response)
        return found


def post(up: Up, path: str, session: str, body: dict[str, object]) -> str:
    headers = {"Content-Type": "application/json", "x-kvmesh-session-id": session}
    request = urllib.request.Request(up.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return str(response.read().decode())


def ask(up: Up, session: str, model: str = "chat", text: str = "Hello") -> str:
    """Send a request under the session; returns the model that its answer names."""
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    return str(json.loads(post(up, "/v1/chat/completions", session, body))["model"])


def counted(up: Up) -> dict[str, int]:
    """The requests to count tokens, by model."""
    with urllib.request.urlopen(f"{up.url}/metrics", timeout=PATIENCE_S) as response:
        text = response.read().decode()
    found = re.findall(r"^kvmesh_frontend_requests_total\{([^}]*)\} (\d+)", text, re.MULTILINE)
    return {
        re.sub(r'.*model="([^"]*)".*', r"\1", labels): int(number)
        for labels, number in found
        if "count_tokens" in labels
    }


def served(up: Up) -> dict[str, int]:
    """The requests of each model of the alias."""
    report = json.loads(up.command("model", "alias", "--json").stdout)
    return {model["model"]: model["requests"] for model in report[0]["models"]}


async def test_an_alias_from_its_first_day_to_its_last(up: Up) -> None:
    await up.ready()
    other = other_worker(up)
    try:
        await eventually(lambda: "other" in str(get(up, "/v1/models")))
        result = up.command("model", "alias", "chat=kvmesh-demo:50,other:50")
        assert result.stdout == "chat is kvmesh-demo:50,other:50\n", result.stderr
        await eventually(lambda: '"chat"' in json.dumps(get(up, "/v1/models")))
        assert get(up, "/v1/models/chat")["id"] == "chat"

        assert {ask(up, session) for session in SESSIONS} == {"chat"}  # as the client asked
        first = served(up)
        assert sum(first.values()) == len(SESSIONS)
        assert min(first.values()) > 0
        for session in SESSIONS:
            ask(up, session, text=f"another prompt of {session}")
        assert served(up) == {model: 2 * number for model, number in first.items()}  # sticky

        for session in SESSIONS:
            post(up, "/v1/messages/count_tokens", session, BODY)
        assert counted(up) == first  # by the model that would serve it

        cleared = json.loads(post(up, "/v1/cache/clear", "any", {"model": "chat"}))
        assert cleared["ok"], cleared
        holders = {each["name"] for each in cleared["instances"]}
        assert {"worker-0", "other-0"} <= holders

        status = up.command("status").stdout
        assert "50.0%" in status
        assert up.command("model", "alias", "chat=kvmesh-demo:100,other:0").returncode == 0
        assert up.command("model", "alias", "chat", "--back").stdout == (
            "chat is kvmesh-demo:50,other:50\n"
        )
    finally:
        other.terminate()
        other.wait(PATIENCE_S)
    await eventually(lambda: '"other"' not in json.dumps(get(up, "/v1/models")))
    before = served(up)["other"]
    for session in SESSIONS:
        ask(up, session)  # the model that is left serves all
    assert served(up)["other"] == before
    assert up.command("model", "alias", "chat", "--remove").returncode == 0
    await eventually(lambda: '"chat"' not in json.dumps(get(up, "/v1/models")))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(up, "late")


async def test_wrong_definitions_are_one_line(up: Up) -> None:
    await up.ready()
    for text, reason in (
        ("chat", "'chat' is not NAME=MODEL[:WEIGHT],…"),
        ("chat=a:x", "'x' is no weight of a model"),
        ("chat=a:0", "'chat=a:0' gives no model a weight"),
        ("chat=a,a", "'chat=a,a' names a model twice"),
        ("chat=a:-1", "'a:-1' is not MODEL[:WEIGHT] with a weight of 0 or more"),
    ):
        result = up.command("model", "alias", text)
        assert (result.returncode, result.stderr) == (2, f"kvmesh model: {reason}\n")
    assert up.command("model", "alias", "nobody", "--back").returncode == 1
    assert up.command("model", "alias", "--remove").returncode == 2
    result = up.command("model", "alias", "new=nothing")
    assert "nobody serves nothing now" in result.stderr
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(up, "s", "new")
