"""Health checks of the frontends and the dashboard, and the announcement of their addresses."""

import asyncio
import http.client
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.05
TIMEOUT_S = 2.0
KEY = "$KEY"


async def until_healthy(host: str, port: int) -> None:
    """Return once /health returns 200 on the port."""
    while await asyncio.to_thread(_status, host, port, "/health") != http.client.OK:
        await asyncio.sleep(POLL_S)


def _status(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def reachable(host: str) -> str:
    """An address at which this machine reaches a server that listens on `host`."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    return "::1" if host == "::" else host


def url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on `host`."""
    name = reachable(host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def announcement(
    host: str,
    ports: Sequence[int],
    models: Sequence[str],
    nats_url: str,
    key: str,
    token_file: Path | None = None,
    keyless: bool = False,
    dashboard: str = "",
) -> str:
    """The addresses for clients and a curl command; `key` is an API key or a shell variable.

    `keyless`: the frontends require API keys, and none exists. `dashboard` is its URL, if any.
    """
    base = url(host, ports[0])
    more = f"  (and ports {', '.join(map(str, ports[1:]))})" if len(ports) > 1 else ""
    model = models[0] if models else "MODEL"
    token = f" --nats-token-file {shlex.quote(str(token_file))}" if token_file else ""
    mesh = f"--nats {nats_url}{token}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 32,
        "stream": True,
    }
    shown = f' -H "Authorization: Bearer {key}"' if key == KEY else ""
    return "\n".join(
        [
            "",
            f"  kvmesh serves {', '.join(models) or 'no model yet'}{more}",
            "",
            f"  OpenAI API       export OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={key}",
            f"  Anthropic API    export ANTHROPIC_BASE_URL={base} ANTHROPIC_API_KEY={key}",
            *([f"  Dashboard        {dashboard}"] if dashboard else []),
            f"  NATS             {nats_url}",
            f"  Look inside      kvmesh status {mesh}",
            "  Stop             Ctrl-C: running requests finish first",
            "",
            *([_about_keys(keyless, mesh), ""] if key == KEY else []),
            f"  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json'{shown} \\",
            f"    -d '{json.dumps(body)}'",
            "",
        ]
    )


def _about_keys(keyless: bool, mesh: str) -> str:
    if keyless:
        return f"  no API keys yet: export KEY=$(kvmesh keys add NAME {mesh})"
    return "  set KEY to one of your API keys: export KEY=…"
