"""Images before vLLM: the placeholder and tokens of one, and prompts that vLLM expands."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from PIL import Image
from vllm.exceptions import VLLMError
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.media.image import ImageMediaIO

from kvmesh.bus.messages import PromptImage
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.adapters.kv_events.images import identifier
from kvmesh.worker.engine import EngineError

log = logging.getLogger(__name__)
MODALITY = "image"
PROBE = (224, 224)  # pixels
DECODED_BYTES = 256 << 20


class ImagePrompts:
    """Makes vLLM's prompts with images for a model; `token` is that of the `placeholder`."""

    def __init__(self, llm: Any, written: list[int]) -> None:
        multimodal = llm.vllm_config.model_config.multimodal_config
        self._media = ImageMediaIO(**(multimodal.media_io_kwargs or {}).get(MODALITY, {}))
        self._renderer = llm.renderer
        self._written = written
        self._decoded: LruCache[bytes, Any] = LruCache(DECODED_BYTES, _size)
        self.token = 0
        self.placeholder = ""

    async def probe(self) -> bool:
        """Find the one token of a template that vLLM expands to an image; False without it."""
        expanded, start, length = await self._expand(*PROBE)
        replaced = len(self._written) + length - len(expanded)
        if replaced != 1:
            return False
        self.token = self._written[start]
        self.placeholder = self._renderer.tokenizer.convert_ids_to_tokens([self.token])[0]
        return True

    async def measure(self, width: int, height: int) -> int:
        """The tokens of an image of this size; raises EngineError if the model takes none."""
        try:
            return (await self._expand(width, height))[2]
        except (VLLMError, ValueError) as error:
            raise EngineError(f"invalid: {error}") from error

    async def _expand(self, width: int, height: int) -> tuple[list[int], int, int]:
        """A prompt with one image as vLLM expands it, and where its tokens start; their number."""
        picture = await asyncio.to_thread(Image.new, "RGB", (width, height))
        prompt = {"prompt_token_ids": self._written, "multi_modal_data": {MODALITY: [picture]}}
        # apart from the cache that mirrors that of the engine
        (made,) = await self._renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        (place,) = made["mm_placeholders"][MODALITY]
        return made["prompt_token_ids"], place.offset, place.length

    async def data(self, images: Sequence[PromptImage], files: Sequence[bytes]) -> dict[str, Any]:
        """The fields of a prompt for its images; raises ValueError for one that is malformed."""
        decoded = []
        for image, file in zip(images, files, strict=True):
            media = self._decoded.get(image.digest)
            if media is None:
                media = await asyncio.to_thread(self._media.load_bytes, file)
                self._decoded.put(image.digest, media)
            decoded.append(media)
        return {
            "multi_modal_data": {MODALITY: decoded},
            "multi_modal_uuids": {MODALITY: [identifier(image) for image in images]},
        }


async def image_prompts(llm: Any) -> ImagePrompts | None:
    """The prompts of a started engine with images; None if its model reads none."""
    config, renderer = llm.vllm_config.model_config, llm.renderer
    if renderer.mm_processor is None:
        return None
    try:
        if not renderer.mm_processor.info.allowed_mm_limits.get(MODALITY):
            return None
        text = get_model_cls(config).get_placeholder_str(MODALITY, 1)
        written = renderer.tokenizer.encode(text, add_special_tokens=False) if text else []
        prompts = ImagePrompts(llm, written)
        if written and await prompts.probe():
            return prompts
        reason = "no single token of its prompts stands for one"
    except Exception as error:  # models raise any type
        reason = str(error) or type(error).__name__
    log.warning("the model reads images, but this worker passes none on: %s", reason)
    return None


def _size(_: bytes, media: Any) -> int:
    width, height = media.media.size
    return 4 * int(width * height)
