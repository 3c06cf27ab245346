"""Images before a vLLM server: requests of tokens and files to its `/inference/v1/generate`.

The server hashes blocks with the names that a request gives its images, and returns them in its KV
events. vLLM has the endpoint since 0.32, other servers have not.
"""

import asyncio
import base64
import io
from collections.abc import Sequence
from typing import Any

import aiohttp
from PIL import Image

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import Work
from kvmesh.settings import redacted
from kvmesh.worker.adapters.kv_events.images import identifier
from kvmesh.worker.adapters.request_streams import EngineUnavailable
from kvmesh.worker.engine import EngineError, Rejected
from kvmesh.worker.engines.remote.answers import check
from kvmesh.worker.engines.remote.completions import sampling_parameters
from kvmesh.worker.images import with_placeholders

PATH = "/inference/v1/generate"
MODALITY = "image"
PROBE = (224, 224)  # pixels
MEASURE_S = 60.0


class ServerImages:
    """Sends the images of requests for `model` to a server; `token` stands for one in a prompt."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, token: int) -> None:
        self._http = http
        self._url = url + PATH
        self._model = model
        self._token = token

    async def problem(self) -> str:
        """The reason for which the server takes no images; empty if it takes them."""
        try:
            await self.measure(*PROBE)
        except EngineError as error:
            return f"{redacted(self._url)}: {error} (vLLM has it since 0.32)"
        return ""

    async def measure(self, width: int, height: int) -> int:
        """The tokens of an image of this size.

        Raises EngineError, whose text begins with "invalid: " if the server refuses the image.
        """
        file = await asyncio.to_thread(_blank, width, height)
        body = {
            "model": self._model,
            "token_ids": [self._token],
            "content_parts": [_part(file, f"kvm-measure-{width}-{height}")],
            "sampling_params": {"max_tokens": 1},
            "return_token_ids": True,
        }
        timeout = aiohttp.ClientTimeout(MEASURE_S)
        try:
            async with self._http.post(self._url, json=body, timeout=timeout) as response:
                await check(response)
                content = await response.json()
            places = (content.get("mm_placeholders") or {}).get(MODALITY) or []
            tokens = sum(int(place["length"]) for place in places)
            expanded = len(content["prompt_token_ids"])
        except Rejected as error:
            raise EngineError(f"invalid: {error}" if error.invalid else str(error)) from error
        except (
            *(aiohttp.ClientError, TimeoutError, EngineUnavailable),
            *(ValueError, LookupError, TypeError, AttributeError),
        ) as error:
            raise EngineError(redacted(f"cannot use {self._url}: {cause(error)}")) from error
        if not tokens or tokens != expanded:
            raise EngineError(f"the server places {tokens} tokens of an image among {expanded}")
        return tokens

    def request_fields(
        self, work: Work, files: Sequence[bytes], tag: str | None, usage: bool
    ) -> dict[str, Any]:
        """Body of a streamed request, as `completions.request_fields`; raises Rejected."""
        images = work.images
        fields: dict[str, Any] = {
            "model": work.adapter or self._model,
            "token_ids": with_placeholders(work.tokens, images, self._token),
            "content_parts": [
                _part(file, identifier(image)) for image, file in zip(images, files, strict=True)
            ],
            "sampling_params": sampling_parameters(work),
            "stream": True,
        }
        if tag is not None:
            fields["cache_salt"] = tag
        if usage:
            fields["stream_options"] = {"include_usage": True}
        return fields


def _part(file: bytes, name: str) -> dict[str, str]:
    """A file under the name by which vLLM hashes it; vLLM finds out its format itself."""
    data = base64.b64encode(file).decode()
    return {"type": "image_url", "url": f"data:image/png;base64,{data}", "uuid": name}


def _blank(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()
