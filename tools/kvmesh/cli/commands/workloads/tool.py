"""`kvmesh tool`: reports to a mesh that a tool of a session started, goes on or ended."""

import argparse
import json
import os
from typing import get_args
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from kvmesh.bus.messages import ToolState
from kvmesh.cli.arguments import failed, seconds
from kvmesh.settings import Settings

TIMEOUT_S = 5.0
SHOWN = 500  # characters of an error


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh tool SESSION EVENT [options]"
    parser.epilog = (
        "The session is named as in the headers of its requests (docs/requests.md). A report "
        "changes only the forecast of the session's return; an unknown session is no error."
    )
    parser.add_argument("session", metavar="SESSION", help="the session's name")
    states = get_args(ToolState)
    parser.add_argument("event", choices=states, metavar="EVENT", help=", ".join(states))
    parser.add_argument("--tool", default="", metavar="NAME", help="the tool's name")
    parser.add_argument("--call", default="", metavar="ID", help="id of the tool call")
    parser.add_argument(
        "--remaining", type=seconds, metavar="S", help="estimated seconds until the tool ends"
    )
    url = os.environ.get("KVMESH_URL") or "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help="frontend [KVMESH_URL] (%(default)s)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="API key for the frontend [OPENAI_API_KEY]",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    body = {"event": arguments.event, "tool": arguments.tool, "call": arguments.call}
    if arguments.remaining is not None:
        body["remaining_s"] = arguments.remaining
    url = f"{arguments.url.rstrip('/')}/v1/sessions/{quote(arguments.session, safe='')}/tools"
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    if not url.startswith(("http://", "https://")):
        return failed("tool", f"not an HTTP URL: {arguments.url}", 2)
    try:
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=TIMEOUT_S):
            return 0
    except HTTPError as error:
        reason = f"{error.code} {_message(error.read(1 << 16))}"
    except URLError as error:
        reason = f"{arguments.url}: {error.reason}"
    except (OSError, ValueError) as error:
        reason = f"{arguments.url}: {error}"
    return failed("tool", reason)


def _message(body: bytes) -> str:
    """The message of an error response, or its text."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:SHOWN]
