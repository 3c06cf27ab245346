"""HTTP client of an inference server: model information, health, load, adapters."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import aiohttp
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.bus.errors import cause
from kvmesh.index import TIERS
from kvmesh.settings import redacted
from kvmesh.worker.adapters.connector_series import (
    CORRUPT,
    KVBM_COUNTERS,
    LOADED_SERIES,
    SKIPPED,
    WRITTEN,
)
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.engine import EngineConfigError, EngineError, Unsupported
from kvmesh.worker.engines.remote.completions import cached_tokens
from kvmesh.worker.engines.remote.gauges import Gauges, gauges_of, rank_gauges, vllm_ranks
from kvmesh.worker.lora.folder import AdapterError

PROBE_TIMEOUT_S = 5.0


class ServerInfo(Struct, frozen=True, kw_only=True):
    """Model and sizes of a server; 0 or empty if the server does not report them.

    `ranks` are its data-parallel ranks among those of all servers of a vLLM deployment, which
    begin at another number than 0 behind a load balancer of the user's own. An SGLang server that
    does not say so `generates` text.
    """

    model: str
    owner: str
    version: str = ""
    context: int = 0
    block_size: int = 0
    blocks: int = 0
    max_sequences: int = 0
    adapters: list[str] = []
    ranks: list[int] = []
    generates: bool = True


class InferenceServer:
    """Client of the server's endpoints; raises EngineError if a required one fails."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._redacted_url = redacted(self._url)

    async def describe(self, model: str) -> ServerInfo:
        """Information about `model`, or about the first model served if `model` is empty."""
        models = (await self._json("/v1/models")).get("data") or []
        bases = [card for card in models if not card.get("parent")]
        candidates = [card for card in bases if model in ("", card["id"])]
        if not candidates:
            names = ", ".join(card["id"] for card in bases) or "none"
            raise EngineConfigError(
                f"{self._redacted_url} serves no model {model!r}; it has: {names}"
            )
        card = candidates[0]
        info = ServerInfo(
            model=card["id"],
            owner=card.get("owned_by") or "",
            version=await self._version(),
            context=card.get("max_model_len") or 0,
            adapters=[c["id"] for c in models if c.get("parent")],
        )
        return await self._with_sizes(info)

    async def try_completion(self, model: str) -> bool:
        """Generate one token to check that the server accepts and returns token ids.

        True if the server reports cached tokens.
        """
        body = {
            "model": model,
            "prompt": [1],
            "max_tokens": 1,
            "stop_token_ids": [],
            "return_token_ids": True,
        }
        path = f"{self._url}/v1/completions"
        try:
            async with self._http.post(path, json=body | {"stream": False}) as response:
                response.raise_for_status()
                content = await response.json()
                choice = content["choices"][0]
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError) as error:
            raise EngineError(redacted(f"cannot use {path}: {cause(error)}")) from error
        if choice.get("token_ids") is None:
            raise EngineConfigError(
                f"{redacted(path)} does not return token ids (return_token_ids)"
            )
        return cached_tokens(content) is not None

    async def healthy(self) -> bool:
        """True if /health replies 200 within PROBE_TIMEOUT_S."""
        try:
            timeout = aiohttp.ClientTimeout(PROBE_TIMEOUT_S)
            async with self._http.get(f"{self._url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def gauges(self, model: str, ranks: Sequence[int] = ()) -> tuple[Gauges, list[Gauges]]:
        """Load of the server by its metrics, and of each of these ranks; all None without any."""
        samples = await self._metrics()
        total = gauges_of(samples, model)._replace(tiers=_tier_counts(samples))
        return total, rank_gauges(samples, model, ranks)

    async def post(
        self, path: str, params: dict[str, str], timeout_s: float
    ) -> tuple[int, dict[str, Any], str]:
        """Post without a body; the status, the body as an object, and its text or message.

        Raises EngineError without a reply.
        """
        timeout, url = aiohttp.ClientTimeout(timeout_s), self._url + path
        try:
            async with self._http.post(url, params=params, timeout=timeout) as response:
                status, text = response.status, (await response.text())[:2000]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(redacted(f"{url}: {cause(error)}")) from error
        return status, _object(text), message_of(text).strip()

    async def arguments(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The server's arguments: SGLang's `ServerArgs` or vLLM's configuration; empty if untold.

        vLLM tells them in its development mode only. Raises EngineError if it does not reply.
        """
        timeout_s = timeout_s or PROBE_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                told = await self._optional("/server_info?config_format=json")
                told = told or await self._optional("/get_server_info")
        except TimeoutError:
            reason = f"{self._redacted_url} does not reply within {timeout_s:g} s"
            raise EngineError(reason) from None
        config = told.get("vllm_config", told)
        return config if isinstance(config, dict) else {}

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter by vLLM's API; raises AdapterError or Unsupported."""
        await self._change_adapter("load", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter by vLLM's API; raises AdapterError or Unsupported."""
        await self._change_adapter("unload", {"lora_name": name})

    async def _change_adapter(self, verb: str, body: dict[str, str]) -> None:
        path = f"/v1/{verb}_lora_adapter"
        try:
            async with self._http.post(self._url + path, json=body) as response:
                status, text = response.status, (await response.text())[:2000]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AdapterError(redacted(f"{self._url}{path}: {cause(error)}")) from error
        if status in (404, 405) and "error" not in _object(text):
            raise Unsupported(
                f"the server has no {path}: vLLM has it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if status != 200:
            raise AdapterError(f"the server replied {status}: {message_of(text)}")

    async def _with_sizes(self, info: ServerInfo) -> ServerInfo:
        if info.owner == "sglang":
            info_page = await self._optional("/get_server_info") or await self._optional(
                "/server_info"
            )
            page = info_page.get("page_size") or 0
            model_page = await self._optional("/get_model_info")
            return replace(
                info,
                generates=model_page.get("is_generation") is not False,
                block_size=page,
                blocks=(info_page.get("max_total_num_tokens") or 0) // (page or 1),
                max_sequences=info_page.get("max_running_requests") or 0,
            )
        samples = await self._metrics()
        config = [labels for name, labels, _ in samples if name.endswith("_info")]
        sizes = next((labels for labels in config if "num_gpu_blocks" in labels), {})
        return replace(
            info,
            block_size=_whole(sizes.get("block_size")),
            blocks=_whole(sizes.get("num_gpu_blocks")),
            ranks=vllm_ranks(samples, info.model),
        )

    async def _version(self) -> str:
        return str((await self._optional("/version")).get("version", ""))

    async def _json(self, path: str) -> dict[str, Any]:
        try:
            async with self._http.get(self._url + path) as response:
                response.raise_for_status()
                found = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(redacted(f"cannot use {self._url}{path}: {cause(error)}")) from error
        if not isinstance(found, dict):
            raise EngineError(f"{self._redacted_url}{path} is not a JSON object")
        return found

    async def _optional(self, path: str) -> dict[str, Any]:
        try:
            return await self._json(path)
        except EngineError:
            return {}

    async def _metrics(self) -> list[tuple[str, dict[str, str], float]]:
        timeout = aiohttp.ClientTimeout(PROBE_TIMEOUT_S)
        try:
            async with self._http.get(f"{self._url}/metrics", timeout=timeout) as response:
                text = await response.text() if response.status == 200 else ""
            return list(_samples(text))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return []


def message_of(text: str) -> str:
    """The message in the body of an error response."""
    content = _object(text)
    error = content.get("error", content or text)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _tier_counts(samples: list[tuple[str, dict[str, str], float]]) -> TierCounts | None:
    """The blocks that kvmesh's connector has moved on all ranks; None without the connector."""
    totals = dict.fromkeys(KVBM_COUNTERS, 0)
    series = {f"{name}_total": key for key, name in KVBM_COUNTERS.items()}
    loaded, found = [0] * TIERS, False
    for name, labels, value in samples:
        if name in series:
            totals[series[name]] += int(value)
            found = True
        elif name == f"{LOADED_SERIES}_total" and (tier := _whole(labels.get("tier"))) < TIERS:
            loaded[tier] += int(value)
    if not found:
        return None
    return TierCounts(
        loaded=loaded,
        written=totals[WRITTEN],
        skipped=totals[SKIPPED],
        corrupt=totals[CORRUPT],
    )


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if isfinite(sample.value):
                yield sample.name, sample.labels, sample.value


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
