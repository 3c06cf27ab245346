"""Images over a whole mesh of mock engines, with clients that know nothing of it."""

import base64
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.images import PNG, data_url, image
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

if TYPE_CHECKING:  # each process of the mesh tests reads this file
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL, BLIND = "kvmesh-demo", "blind"
TOKENS, BLOCK = 40, 16
LONG = "Please look at this picture with care. " * 20
LIMITS = {"KVMESH_FRONTEND_MAX_IMAGES": "3", "KVMESH_FRONTEND_MAX_IMAGE_PIXELS": "10000"}


@pytest.fixture(scope="module")
def mesh(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    env = {"KVMESH_WORKER_CONTEXT": "4096", **LIMITS}
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), env)
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    reads = {"KVMESH_MOCK_IMAGE_TOKENS": str(TOKENS)}
    for number in (0, 1):
        mesh.start("worker", f"worker-{number}", **reads)
    mesh.start("worker", "blind-0", KVMESH_WORKER_SERVED_NAME=BLIND)
    mesh.start("frontend", "frontend-0")
    yield mesh
    mesh.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    await mesh.ready()
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="x", max_retries=0) as client:

        async def listed() -> bool:
            return {model.id async for model in client.models.list()} == {MODEL, BLIND}

        await eventually(listed, what="all models are served")
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(mesh: Mesh, client: AsyncOpenAI) -> AsyncIterator["AsyncAnthropic"]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=mesh.url, api_key="x", max_retries=0) as anthropic_client:
        yield anthropic_client


def part(file: bytes, media_type: str = PNG) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file, media_type)}}


def source(file: bytes, media_type: str = PNG) -> Any:
    data = base64.b64encode(file).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


async def chat(client: AsyncOpenAI, *content: Any, model: str = MODEL) -> Any:
    messages: Any = [{"role": "user", "content": [*content]}]
    return await client.chat.completions.create(model=model, messages=messages, max_tokens=2)


def text(text: str) -> Any:
    return {"type": "text", "text": text}


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


async def test_an_image_has_its_tokens_in_usage(client: AsyncOpenAI) -> None:
    without = await chat(client, text(LONG))
    one = await chat(client, text(LONG), part(image()))
    assert one.usage.prompt_tokens == without.usage.prompt_tokens + TOKENS


async def test_blocks_of_an_image_are_found_again_and_no_others(client: AsyncOpenAI) -> None:
    first, other = image("navy"), image("teal")
    opening = text("Of the blocks of an image. " + LONG)
    await chat(client, opening, part(first), text(LONG))
    again = await chat(client, opening, part(first), text(LONG))
    assert cached(again) == again.usage.prompt_tokens // BLOCK * BLOCK
    before = await chat(client, opening)
    changed = await chat(client, opening, part(other), text(LONG))
    assert changed.usage.prompt_tokens == again.usage.prompt_tokens
    assert 0 < cached(changed) <= before.usage.prompt_tokens


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_the_format_is_that_of_the_content(client: AsyncOpenAI, form: str) -> None:
    plain = await chat(client, text("Hi"))
    for media_type in (f"image/{form.lower()}", "image/jpeg", "application/octet-stream"):
        answer = await chat(client, text("Hi"), part(image(form=form), media_type))
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens + TOKENS


async def test_all_apis_make_the_same_prompt(client: AsyncOpenAI, claude: "AsyncAnthropic") -> None:
    file = image("olive")
    before = text("Of all the APIs. " + LONG)
    counts = [(await chat(client, before, part(file))).usage.prompt_tokens]
    messages: Any = [{"role": "user", "content": [before, source(file)]}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages}
    answer = await claude.messages.create(**body, max_tokens=2)
    usage = answer.usage
    counts.append(
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )
    assert (usage.cache_read_input_tokens or 0) >= counts[0] // BLOCK * BLOCK - BLOCK
    counts.append((await claude.messages.count_tokens(**body)).input_tokens)
    content = [
        {"type": "input_text", "text": before["text"]},
        {"type": "input_image", "image_url": data_url(file), "detail": "auto"},
    ]
    items: Any = [{"role": "user", "content": content}]
    response = await client.responses.create(model=MODEL, input=items, max_output_tokens=16)
    assert response.usage is not None
    counts.append(response.usage.input_tokens)
    counts.append(
        (await client.responses.input_tokens.count(model=MODEL, input=items)).input_tokens
    )
    assert len(set(counts)) == 1


async def test_results_of_tools_show_images(client: AsyncOpenAI, claude: "AsyncAnthropic") -> None:
    file = image("purple")
    tool: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}

    def history(*result: Any) -> Any:
        return [
            {"role": "user", "content": "Look at it."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": [*result]}],
            },
        ]

    async def count(*result: Any) -> int:
        found = await claude.messages.count_tokens(
            model=MODEL, messages=history(*result), tools=[tool]
        )
        return found.input_tokens

    one, two = await count(source(file)), await count(source(file), source(file))
    assert two == one + TOKENS
    output: Any = [{"type": "input_image", "image_url": data_url(file)}] * 2
    call: Any = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1"}
    asked: Any = [{"role": "user", "content": "Look at it."}, call]
    sizes = []
    for shown in (output, output[:1]):
        items: Any = [*asked, {**result, "output": shown}]
        answer = await client.responses.create(model=MODEL, input=items, max_output_tokens=16)
        assert answer.usage is not None
        sizes.append(answer.usage.input_tokens)
    assert sizes[0] == sizes[1] + TOKENS


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"GIF89a", "no whole image"),
        (image()[:-40], "no whole image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no whole image"),
        (image(form="BMP"), "no whole image"),
        (image(size=(101, 100)), "frontend.max_image_pixels"),
    ],
)
async def test_a_file_that_cannot_be_read_is_refused_once(
    client: AsyncOpenAI, claude: "AsyncAnthropic", file: bytes, words: str
) -> None:
    import anthropic

    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await chat(client, text("Hi"), part(file))
    assert refused.value.code == "invalid_image"
    asked: Any = [{"role": "user", "content": [text("Hi"), source(file)]}]
    with pytest.raises(anthropic.BadRequestError, match=words):
        await claude.messages.create(model=MODEL, messages=asked, max_tokens=2)
    # a client that keeps the message is served
    later: Any = [*asked, {"role": "assistant", "content": "No."}, {"role": "user", "content": "?"}]
    await claude.messages.create(model=MODEL, messages=later, max_tokens=2)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/a.png", "neither a data: nor an https: URL"),
        ("file:///etc/hostname", "neither a data: nor an https: URL"),
        ("https://example.com/a.png", "frontend.image_hosts"),
        ("https://[::1]/a.png", "frontend.image_hosts"),
        ("https://[x/a.png", "malformed"),
        ("data:image/png;base64,é", "not base64"),
        ("file-abc", "neither a data: nor an https: URL"),
        ("", "neither a data: nor an https: URL"),
    ],
)
async def test_an_address_that_is_not_listed_is_refused(
    client: AsyncOpenAI, url: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await chat(client, text("Hi"), {"type": "image_url", "image_url": {"url": url}})


async def test_too_many_images_are_refused(client: AsyncOpenAI) -> None:
    await chat(client, *[part(image())] * 3)
    with pytest.raises(openai.BadRequestError, match=r"frontend\.max_images") as refused:
        await chat(client, *[part(image())] * 4)
    assert refused.value.code == "too_many_images"


async def test_other_files_are_refused_by_name(client: AsyncOpenAI) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
    for file, name in ((audio, "audio files"), (video, "videos")):
        with pytest.raises(openai.BadRequestError, match=f"does not read {name}"):
            await chat(client, text("Hi"), file)


async def test_a_model_without_images_says_so(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not read images"):
        await chat(client, text("Hi"), part(image()), model=BLIND)


async def test_the_text_of_a_placeholder_is_no_image(client: AsyncOpenAI) -> None:
    with_text = await chat(client, text("<|image|> is a token"))
    with_both = await chat(client, text("<|image|> is a token"), part(image()))
    assert with_both.usage.prompt_tokens == with_text.usage.prompt_tokens + TOKENS


async def test_a_worker_that_begins_anew_gets_the_files_again(
    mesh: Mesh, client: AsyncOpenAI
) -> None:
    file = image("gold")
    await chat(client, text("Again. " + LONG), part(file))
    for number in (0, 1):
        mesh.kill(f"worker-{number}")
        mesh.start("worker", f"worker-{number}", KVMESH_MOCK_IMAGE_TOKENS=str(TOKENS))

    async def served() -> bool:
        try:
            answer = await chat(client, text("Again. " + LONG), part(file))
        except openai.APIStatusError:
            return False
        return bool(answer.usage.prompt_tokens > TOKENS)

    await eventually(served, what="a worker has the image")
