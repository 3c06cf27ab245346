"""The inputs of one work as requests of vLLM, for vectors or scores."""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm import PoolingParams

from kvmesh.bus.messages import EMBED, Pooling, Work
from kvmesh.worker.adapters.request_streams import EngineUnavailable, StreamOutput

SEGMENTS = "compressed_token_type_ids"  # vLLM's name for the place of the second text
Prompt = Callable[[list[int]], dict[str, Any]]


async def pooled(
    llm: Any,
    work: Work,
    pooling: Pooling,
    prompt: Prompt,
    lora: Any,
    headers: Mapping[str, str] | None,
) -> StreamOutput:
    """The vectors of all inputs, each a request that vLLM batches with others.

    `prompt` makes one of an input's tokens. Raises what vLLM raises for the first that fails.
    """

    async def encode(index: int, tokens: list[int], params: PoolingParams) -> Any:
        output, name = None, f"{work.request}.{index}"
        outputs = llm.encode(prompt(tokens), params, name, lora, headers, priority=-work.priority)
        async for found in outputs:
            output = found
        if output is None or getattr(output, "error", None) is not None:
            raise EngineUnavailable("vLLM gave no vector")
        return output

    inputs = enumerate(_inputs(work, pooling, llm.vllm_config.model_config))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(encode(index, *each)) for index, each in inputs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    outputs = [task.result() for task in tasks]
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return StreamOutput([], "stop", cached, vectors=[_packed(output) for output in outputs])


def _inputs(work: Work, pooling: Pooling, config: Any) -> Iterator[tuple[list[int], PoolingParams]]:
    tokens, start = array("I", work.tokens), 0
    has_segments = getattr(config.hf_config, "type_vocab_size", 0) > 1
    seconds = pooling.seconds or [0] * len(pooling.lengths)
    for length, second in zip(pooling.lengths, seconds, strict=True):
        params = PoolingParams(
            task="embed" if pooling.task == EMBED else "classify",
            dimensions=pooling.dimensions,
            extra_kwargs={SEGMENTS: second} if second and has_segments else None,
        )
        yield tokens[start : start + length].tolist(), params
        start += length


def _packed(output: Any) -> bytes:
    vector = output.outputs.data.float().cpu().numpy().reshape(-1)
    return bytes(vector.astype("<f4").tobytes())
