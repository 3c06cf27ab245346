"""Images of conversations: where they may come from, what of them is read, and their tokens."""

import asyncio
import base64
from array import array
from io import BytesIO
from typing import Any

import pytest
from PIL import Image as Pillow
from support.images import data_url, image

from kvmesh.bus.messages import ModelCard, PromptImage, Sampling
from kvmesh.frontend.conversation import (
    GenerateRequest,
    Image,
    ImageFile,
    Insertion,
    Message,
    RenderedPrompt,
    ShownImage,
    Text,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.preprocess.attachments import images_behind_results
from kvmesh.frontend.preprocess.images import fetch, loader
from kvmesh.frontend.preprocess.images.fetch import ImageFetcher, PublicResolver, is_public
from kvmesh.frontend.preprocess.images.files import ImageRefused, data_of, size_of
from kvmesh.frontend.preprocess.images.loader import ImageLoader
from kvmesh.frontend.preprocess.images.placeholders import prompt_images, with_images
from kvmesh.hashing import FIRST_IMAGE_TOKEN, block_hashes, image_tokens
from kvmesh.settings.schema import FrontendSettings

PLACE = "<|image|>"
CARD = ModelCard(name="m", context=4096, block_size=16, files="f", image_placeholder=PLACE)
SETTINGS = FrontendSettings(max_image_bytes=10_000, image_hosts=["example.com", "other.org:8443"])


def request(*urls: str, tenant: str = "") -> GenerateRequest:
    blocks: Any = [Image(url) for url in urls]
    sampling = Sampling(max_tokens=1)
    message = Message("user", blocks)
    return GenerateRequest(
        id="r", model="m", sampling=sampling, messages=[message], cache_salt=tenant
    )


async def measure(card: ModelCard, width: int, height: int) -> int:
    return width * height // 100


def make_loader(most: int = 1 << 20) -> ImageLoader:
    return ImageLoader(SETTINGS, FairThreads(), measure, lambda: most)


def shown(digest: bytes, length: int) -> ShownImage:
    return ShownImage(ImageFile(digest, b"data", 1, 1), length)


# files


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_size_is_that_of_the_content(form: str) -> None:
    assert size_of(image(size=(30, 20), form=form), 600) == (30, 20)


def test_a_turned_photo_has_the_size_in_which_it_is_shown() -> None:
    for orientation in range(1, 9):
        exif, file = Pillow.Exif(), BytesIO()
        exif[0x0112] = orientation
        Pillow.new("RGB", (30, 20)).save(file, "JPEG", exif=exif)
        turned = orientation > 4
        assert size_of(file.getvalue(), 600) == ((20, 30) if turned else (30, 20))


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", image()[:80], image(form="TIFF")])
def test_what_cannot_be_decoded_is_refused(data: bytes) -> None:
    with pytest.raises(ImageRefused, match="no whole image"):
        size_of(data, 1 << 20)


def test_a_large_image_is_refused_before_it_is_decoded() -> None:
    header = image(size=(2, 2))
    huge = header[:16] + (60_000).to_bytes(4) * 2 + header[24:]  # a PNG that says so of itself
    with pytest.raises(ImageRefused):
        size_of(huge, 1 << 24)


@pytest.mark.parametrize("url", ["data:image/png;base64,***", "data:image/png;base64,a"])
def test_data_that_is_not_base64_is_refused(url: str) -> None:
    with pytest.raises(ImageRefused, match="not base64"):
        data_of(url)


# addresses


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.0.1",
        "::1",
        "fe80::1%eth0",
        "fd00::1",
        "100.64.0.1",
        "0.0.0.0",
        "::ffff:127.0.0.1",
        "host",
    ],
)
def test_private_addresses_are_told(address: str) -> None:
    assert not is_public(address)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com.evil.org/a", "frontend.image_hosts"),
        ("https://example.com:8443/a", "frontend.image_hosts"),
        ("https://other.org/a", "frontend.image_hosts"),
        ("https://user@example.com/a", "neither a data: nor an https: URL"),
        ("http://example.com/a", "neither a data: nor an https: URL"),
        ("ftp://example.com/a", "neither a data: nor an https: URL"),
        ("https:///a", "neither a data: nor an https: URL"),
    ],
)
async def test_only_listed_hosts_are_asked(url: str, words: str) -> None:
    with pytest.raises(ImageRefused, match=words):
        await ImageFetcher(SETTINGS.image_hosts).fetch(url, 10)


@pytest.mark.asyncio
async def test_a_listed_host_with_a_private_address_is_not_asked() -> None:
    with pytest.raises(OSError, match="private address"):
        await PublicResolver().resolve("localhost", 443)
    with pytest.raises(ImageRefused, match="cannot be fetched"):
        await ImageFetcher(["localhost"]).fetch("https://localhost/a.png", 10)
    with pytest.raises(ImageRefused, match="private address"):
        await ImageFetcher(["127.0.0.1"]).fetch("https://127.0.0.1/a.png", 10)


# the loader


@pytest.mark.asyncio
async def test_equal_files_are_one_whatever_their_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    read, fetched = list[int](), list[str]()

    async def download(url: Any, max_bytes: int) -> bytes:
        fetched.append(str(url))
        return file

    def counted(data: bytes, pixels: int) -> tuple[int, int]:
        read.append(len(data))
        return size_of(data, pixels)

    monkeypatch.setattr(fetch, "_download", download)
    monkeypatch.setattr(loader, "size_of", counted)
    file, images = image(), make_loader()
    urls = [data_url(file), data_url(file, "image/jpeg"), "https://example.com/a.png"]
    for _ in range(3):
        asked = request(*urls)
        await images.load(asked, CARD)
        found = [asked.images[url] for url in urls]
        assert all(isinstance(each, ShownImage) for each in found)
        assert len({each.file.digest for each in found if isinstance(each, ShownImage)}) == 1
    assert len(fetched) == 1  # later turns repeat what the first one got
    assert len(read) <= 3  # at once at first, and never again
    digest = next(each.file.digest for each in found if isinstance(each, ShownImage))
    assert images.data(digest) == file
    await images.load(request("https://example.com/a.png", tenant="other"), CARD)
    assert len(fetched) == 2  # no tenant learns what another has fetched


@pytest.mark.asyncio
async def test_each_image_has_its_own_reason() -> None:
    good, large = data_url(image()), data_url(bytes(20_000))
    asked = request(good, large, "data:image/png;base64,AAAA")
    await make_loader().load(asked, CARD)
    assert isinstance(asked.images[good], ShownImage)
    assert "at most 10000" in str(asked.images[large])
    await make_loader(most=100).load(asked, CARD)  # the largest message
    assert "at most 100" in str(asked.images[good])


@pytest.mark.asyncio
async def test_the_images_of_a_request_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequest, match=r"frontend\.max_images"):
        await make_loader().load(request(*map(str, range(101))), CARD)
    monkeypatch.setattr(loader, "REQUEST_BYTES", 10)
    with pytest.raises(InvalidRequest, match="at most 10"):
        await make_loader().load(request(data_url(image())), CARD)


# prompts


def test_the_tokens_of_an_image_take_its_placeholder() -> None:
    asked, one, two = request("a", "b"), shown(bytes(range(32)), 3), shown(bytes(32), 9)
    asked.images = {"a": one, "b": two}
    text = f"x{PLACE}answer{PLACE} {PLACE[:1]}{PLACE[1:]}{PLACE}"
    answer = text.index("answer")
    written = text.index(f" {PLACE}") + 1  # by a user, and cut
    inserted = Insertion(answer, answer + len(f"answer{PLACE}"), b"1234")
    prompt = RenderedPrompt(text, [inserted], [written + 1])
    found = with_images(prompt, asked, PLACE)
    tokens = [each.tokens for each in found.insertions]
    assert tokens == [image_tokens(bytes(range(32)), 3), b"1234", image_tokens(bytes(32), 9)]
    first, second, third = found.insertions
    assert found.text[second.start : second.end] == f"answer{PLACE}"
    assert found.text[: first.start] == "x"
    assert found.text[second.end : third.start] == f" {PLACE}"
    assert third.end == len(found.text)
    assert found.text[found.cuts[0] - 1 :].startswith(PLACE)


def test_equal_texts_with_other_images_differ() -> None:
    def text(digest: bytes) -> str:
        asked = request("a")
        asked.images = {"a": shown(digest, 3)}
        return with_images(RenderedPrompt(PLACE), asked, PLACE).text

    assert text(bytes(32)) == text(bytes(32)) != text(bytes(31) + b"1")


def test_a_template_that_leaves_an_image_out_is_an_error() -> None:
    asked = request("a", "a")
    asked.images = {"a": shown(bytes(32), 3)}
    with pytest.raises(InvalidRequest, match="shows 1 of 2 images"):
        with_images(RenderedPrompt(PLACE), asked, PLACE)


def test_images_are_found_in_the_tokens_even_side_by_side() -> None:
    one, two = shown(bytes(32), 3), shown(b"1" * 32, 2)
    packed = array("I", [5]).tobytes()
    tokens = packed + b"".join(image_tokens(i.file.digest, i.length) for i in (one, one, two))
    found = prompt_images(tokens + packed, [one, one, two])
    assert found == [
        PromptImage(bytes(32), 1, 3),
        PromptImage(bytes(32), 4, 3),
        PromptImage(b"1" * 32, 7, 2),
    ]
    assert prompt_images(tokens[:-4], [one, one, two]) == found[:2]


def test_ids_of_images_are_those_of_their_content_and_of_no_vocabulary() -> None:
    digest = bytes(range(32))
    ids = array("I", image_tokens(digest, 20))
    assert min(ids) >= FIRST_IMAGE_TOKEN
    assert ids[:8] == ids[8:16]
    assert image_tokens(digest, 20)[12:] == image_tokens(digest, 17, skip=3)
    assert block_hashes(ids.tobytes(), 16, 0) != block_hashes(image_tokens(bytes(32), 20), 16, 0)


def test_images_of_results_move_behind_all_results() -> None:
    def result(call: str, *parts: Any) -> ToolResult:
        return ToolResult(call, list(parts))

    one, two, below = Image("1"), Image("2"), Text("[image: see below]")
    answer = Message("assistant", [Text("a")])
    chat = [Message("tool", [result("a", one)]), Message("tool", [result("b", Text("x"), two)])]
    moved = [
        Message("tool", [result("a", below)]),
        Message("tool", [result("b", Text("x"), below)]),
        Message("user", [one, two]),
    ]
    assert images_behind_results(chat) == moved
    assert images_behind_results([*chat, answer]) == [*moved, answer]
    text = Text("go on")
    both = Message("user", [result("a", one), result("b", two), text])
    assert images_behind_results([both]) == [
        Message("user", [result("a", below), result("b", below), one, two, text])
    ]
    plain = [Message("user", [one, text])]
    assert images_behind_results(plain) is plain


def test_base64_of_a_large_file_is_decoded_in_a_thread() -> None:
    file = image(size=(400, 400), form="BMP")
    url = data_url(file)
    assert len(url) > loader.LONG_URL
    asked = request(url)
    asyncio.run(make_loader().load(asked, CARD))
    assert "bytes" in str(asked.images[url])
    assert base64.b64decode(url.partition(",")[2]) == file
