"""Images in prompts: the template's placeholders, and the tokens that stand for them. Pure."""

import secrets
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from kvmesh.bus.messages import PromptImage
from kvmesh.frontend.conversation import GenerateRequest, Insertion, RenderedPrompt, ShownImage
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.preprocess.images.loader import images_of
from kvmesh.hashing import FIRST_IMAGE_TOKEN, image_tokens

# Names an image in a prompt's text, so that equal texts have equal tokens; no client can guess it.
_MARK = f"\ue000kvm{secrets.token_hex(8)}"
_NAME = _MARK + "{digest}:{length:010d}\ue000"


def with_images(
    rendered: RenderedPrompt, request: GenerateRequest, placeholder: str
) -> RenderedPrompt:
    """The prompt with the tokens of its images in the place of their placeholders.

    Raises InvalidRequest if the template does not show each image once.
    """
    shown = shown_images(request)
    if not shown:
        return rendered
    places = _places(rendered, placeholder)
    if len(places) != len(shown):
        reason = f"The model's chat template shows {len(places)} of {len(shown)} images."
        raise InvalidRequest(reason, request.content_field)
    names = [_NAME.format(digest=i.file.digest.hex(), length=i.length) for i in shown]
    growth = len(names[0]) - len(placeholder)

    def moved(offset: int) -> int:
        return offset + growth * bisect_left(places, offset)

    parts, before = [], 0
    for place, name in zip(places, names, strict=True):
        parts += [rendered.text[before:place], name]
        before = place + len(placeholder)
    insertions = [i._replace(start=moved(i.start), end=moved(i.end)) for i in rendered.insertions]
    for place, name, image in zip(places, names, shown, strict=True):
        start, tokens = moved(place), image_tokens(image.file.digest, image.length)
        insertions.append(Insertion(start, start + len(name), tokens))
    return RenderedPrompt(
        "".join([*parts, rendered.text[before:]]),
        sorted(insertions),
        [moved(cut) for cut in rendered.cuts],
    )


def shown_images(request: GenerateRequest) -> list[ShownImage]:
    """The images of a request's messages, in order."""
    if not request.images:
        return []
    found = [request.images[image.url] for image in images_of(request.messages)]
    return [image for image in found if isinstance(image, ShownImage)]


def prompt_images(tokens: bytes, shown: Sequence[ShownImage]) -> list[PromptImage]:
    """The places of images in a prompt of packed tokens, which may end before some of them."""
    if not shown:
        return []
    places = np.flatnonzero(np.frombuffer(tokens, "<u4") >= FIRST_IMAGE_TOKEN)
    found, at = [], 0
    for image in shown:
        if at + image.length > len(places):
            break
        found.append(PromptImage(image.file.digest, int(places[at]), image.length))
        at += image.length
    return found


def _places(rendered: RenderedPrompt, placeholder: str) -> list[int]:
    """The offsets of the template's placeholders: neither cut, as in messages, nor in an answer."""
    text, cuts, places = rendered.text, rendered.cuts, list[int]()
    start = text.find(placeholder)
    while start >= 0:
        end = start + len(placeholder)
        cut = bisect_left(cuts, start + 1)
        broken = cut < len(cuts) and cuts[cut] < end
        if not broken and not any(i.start <= start < i.end for i in rendered.insertions):
            places.append(start)
        start = text.find(placeholder, end)
    return places
