"""The floor of an HTTP frontend: aiohttp on uvloop with made-up responses.

Run in the same session as the mesh, it shows the machine's present speed. `--pace` is seconds
between tokens; 0 sends them as fast as possible, one frame each.
"""

import argparse
import asyncio
import json
from typing import Any

import uvloop
from aiohttp import web


def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "floor", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


FIRST, TOKEN, LAST = chunk({"role": "assistant"}), chunk({"content": " token"}), chunk({}, "length")


def whole(tokens: int) -> web.Response:
    message = {"role": "assistant", "content": " token" * tokens}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return web.json_response({"id": "floor", "choices": [choice]})


async def stream(request: web.Request, tokens: int, pace: float) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(FIRST)
    for _ in range(tokens):
        if pace:
            await asyncio.sleep(pace)
        await response.write(TOKEN)
    await response.write(LAST + b"data: [DONE]\n\n")
    return response


def application(pace: float) -> web.Application:
    async def chat(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        tokens: int = body["max_tokens"]
        return await stream(request, tokens, pace) if body.get("stream") else whole(tokens)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    options = parser.parse_args()
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    app = application(options.pace)
    web.run_app(app, host="127.0.0.1", port=options.port, loop=loop, print=None, access_log=None)


if __name__ == "__main__":
    main()
