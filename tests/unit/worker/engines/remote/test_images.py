"""Images before a server: the one that takes them, and those that do not."""

import base64
import io
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image
from support.engines import work

from kvmesh.bus.messages import PromptImage, Sampling
from kvmesh.worker.engine import EngineError
from kvmesh.worker.engines.remote.completions import read_chunk
from kvmesh.worker.engines.remote.images import PATH, ServerImages

TOKEN = 7
CELL = 56  # pixels on each side of what becomes a token
Ask = Callable[[Callable[[dict[str, Any]], web.Response]], Awaitable[ServerImages]]


@pytest_asyncio.fixture
async def images_of() -> AsyncIterator[Ask]:
    """Starts servers that reply to requests as a function says."""
    servers: list[TestServer] = []
    async with aiohttp.ClientSession() as http:

        async def started(reply: Callable[[dict[str, Any]], web.Response]) -> ServerImages:
            async def handle(request: web.Request) -> web.Response:
                return reply(await request.json())

            app = web.Application()
            app.router.add_post(PATH, handle)
            server = TestServer(app)
            await server.start_server()
            servers.append(server)
            return ServerImages(http, str(server.make_url("")).rstrip("/"), "m", TOKEN)

        yield started
    for server in servers:
        await server.close()


def expanded(body: dict[str, Any]) -> web.Response:
    """A reply as vLLM's: it decodes the image and places it."""
    _, _, data = body["content_parts"][0]["url"].partition(",")
    width, height = Image.open(io.BytesIO(base64.b64decode(data))).size
    length = width // CELL * (height // CELL)
    place = {"offset": 0, "length": length}
    return web.json_response(
        {"prompt_token_ids": [TOKEN] * length, "mm_placeholders": {"image": [place]}}
    )


async def test_a_server_says_how_many_tokens_an_image_has(images_of: Ask) -> None:
    images = await images_of(expanded)
    assert await images.problem() == ""
    assert await images.measure(2 * CELL, 3 * CELL) == 6


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            lambda _: web.json_response({"error": {"message": "--enable-scale-out"}}, status=403),
            "scale-out",
        ),
        (lambda _: web.json_response({"error": {"message": "no images"}}, status=400), "no images"),
        (lambda _: web.json_response({"prompt_token_ids": [TOKEN]}), "places 0 tokens"),
        (lambda _: web.json_response([]), "cannot use"),
        (lambda _: web.Response(status=500), "500"),
    ],
    ids=["disabled", "text only", "ignores them", "other JSON", "fails"],
)
async def test_another_server_takes_none_for_a_reason(
    images_of: Ask, reply: Callable[[dict[str, Any]], web.Response], words: str
) -> None:
    assert words in await (await images_of(reply)).problem()


async def test_a_server_that_has_become_another_measures_nothing(images_of: Ask) -> None:
    images = await images_of(lambda _: web.json_response({"prompt_token_ids": [TOKEN]}))
    with pytest.raises(EngineError, match="places 0 tokens"):
        await images.measure(CELL, CELL)


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
async def test_a_server_that_refuses_the_worker_says_nothing_of_the_image(
    images_of: Ask, status: int
) -> None:
    reply = web.json_response({"error": {"message": "not you"}}, status=status)
    images = await images_of(lambda _: reply)
    with pytest.raises(EngineError, match=rf"^(cannot use )?http.* replied {status}: .*not you"):
        await images.measure(CELL, CELL)


async def test_an_image_that_the_server_refuses_is_invalid(images_of: Ask) -> None:
    images = await images_of(lambda _: web.json_response({"message": "too small"}, status=400))
    with pytest.raises(EngineError, match=r"^invalid: too small"):
        await images.measure(1, 1)


async def test_a_request_names_its_images(images_of: Ask) -> None:
    images = await images_of(expanded)
    tokens = array("I", [1, 2, 3, 4, 5, 6]).tobytes()
    shown = [PromptImage(start=1, length=3, digest=b"a" * 32)]
    asked = work("r", tokens, sampling=Sampling(max_tokens=4, logit_bias={3: 1.0}), images=shown)
    body = images.request_fields(asked, [b"file"], "tag", usage=True)
    assert body["token_ids"] == [1, TOKEN, 5, 6]
    assert body["content_parts"][0]["uuid"] == f"kvm-image-{b'a'.hex() * 32}-3"
    assert body["sampling_params"]["logit_bias"] == {"3": 1.0}
    assert body["cache_salt"] == "tag"


def test_log_probabilities_have_ids() -> None:
    def row(token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "logprob": logprob, "rank": 1}

    content = [{**row(5, -1.5), "top_logprobs": [row(5, -1.5), row(9, -0.25)]}]
    choice = {"index": 0, "token_ids": [5], "finish_reason": None, "logprobs": {"content": content}}
    assert read_chunk({"choices": [choice]}).logprobs == [{5: -1.5, 9: -0.25}]
