"""vLLM's own scheduler, cache and connectors, driven without a model and without copies."""

import time
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.structured_output import StructuredOutputManager

from support.event_streams.stream import StreamWriter

SIZE = 32
ENCODER = msgspec.msgpack.Encoder()
EAGLE = SimpleNamespace(
    use_eagle=lambda: True,
    use_eagle_block_drop=lambda: True,
    needs_eagle_block_drop=lambda: True,
    use_dspark=lambda: False,
    use_dflash=lambda: False,
    use_multi_module_mtp=lambda: False,
    use_gemma4_mtp=lambda: False,
    max_num_new_slots_for_drafting=0,
    disable_eagle_block_drop=False,
    disable_lookahead_block_hashes=False,
    num_speculative_tokens=1,
    num_speculative_tokens_per_batch_size=None,
)
ONE_LAYER = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
BLOCK_BYTES = 2 * SIZE * 32 * 4


class SmallScheduler:
    """A scheduler of `blocks` blocks; `groups` are the specifications of the model's caches.

    `unit` is the number of tokens that a hash of the engine covers.
    """

    def __init__(
        self,
        writer: StreamWriter,
        model: Path,
        groups: list[Any],
        *,
        blocks: int = 40,
        connector: dict[str, Any] | None = None,
        draft: bool = False,
        late: bool = False,
        rank: int = 0,
        unit: int = SIZE,
        scheduler: type[Scheduler] = Scheduler,
        **arguments: Any,
    ) -> None:
        self._writer, self._rank, self._requests = writer, rank, 0
        self._late = Random(1) if late else None  # copies to the host take a few steps
        self._copying: set[int] = set()
        self._guessing = Random(2)  # tokens that a request's own text suggests
        self.ended: list[list[int]] = []  # prompts with their answers
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            block_size=SIZE,
            max_model_len=1024,
            max_num_seqs=8,
            enable_lora=True,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            **arguments,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        if draft:
            config.speculative_config = EAGLE
        caches = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(blocks * BLOCK_BYTES, ["layer0"], 0, BLOCK_BYTES)],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(groups)
            ],
        )
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=unit,
            log_stats=False,
        )
        # the model has no encoder: let it have the images that requests name
        self.scheduler.max_num_encoder_input_tokens = SIZE
        self.scheduler.encoder_cache_manager = EncoderCacheManager(64 * SIZE)
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=self._publish, shutdown=lambda: None
        )
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        # vLLM 0.33 hashes blocks with the draft's tokens after them
        ahead = getattr(config, "num_hash_lookahead_tokens", 0)
        self._hasher = get_request_block_hasher(unit, hash_function, *([ahead] * bool(ahead)))

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def request(
        self,
        tokens: list[int] | None,
        key: Any,
        max_tokens: int = 1,
        report: str = "",
        **fields: Any,
    ) -> Request:
        self._requests += 1
        lora = None
        if key.adapter:
            number = 1 + ["lora-a", "lora-b"].index(key.adapter)
            lora = LoRARequest(key.adapter, number, "/nonexistent")
        more = {"kv_cache_report_mode": report} if report else None
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=more)
        return Request(
            f"r{self._requests}",
            tokens,
            parameters,
            None,
            lora_request=lora,
            cache_salt=key.cache_salt,
            block_hasher=self._hasher,
            **fields,
        )

    def run(self, *requests: Request) -> None:
        """Serve requests to their ends, together."""
        for request in requests:
            self.scheduler.add_request(request)
        deadline = time.monotonic() + 30
        while self.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError("the requests do not end")
            if not self.step():
                time.sleep(0.001)  # files are read and written by other threads
        self.ended += [list(request.all_token_ids) for request in requests]

    def step(self) -> int:
        """One step: each request that has computed all its tokens gets another one.

        Returns the number of requests that computed.
        """
        planned = self.scheduler.schedule()
        names = list(planned.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            guessed = len(planned.scheduled_spec_decode_tokens.get(name, []))
            right = range(8000, 8000 + self._guessing.randrange(guessed + 1))
            sampled.append([*right, 7000 + request.num_tokens] if done else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._transfers(planned),
        )
        self.scheduler.update_from_output(planned, output)
        if self.scheduler.num_spec_tokens:
            going = [name for name in names if name in self.scheduler.requests]
            guesses = [list(range(8000, 8000 + self.scheduler.num_spec_tokens)) for _ in going]
            self.scheduler.update_draft_token_ids(DraftTokenIds(going, guesses))
        return len(names)

    def _transfers(self, planned: Any) -> KVConnectorOutput | None:
        """Copies from the host are done at once, those to it too unless they are `late`."""
        asked = planned.kv_connector_metadata
        if isinstance(asked, SimpleCPUOffloadMetadata):
            ended = {asked.store_event: 1} if asked.store_event >= 0 else {}
            names = {name for ids in asked.load_event_to_reqs.values() for name in ids}
            return KVConnectorOutput(
                finished_recving=names or None,
                kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(ended),
            )
        if asked is None or not hasattr(asked, "store_jobs"):
            return None
        done = OffloadingWorkerMetadata()
        self._copying.update(asked.store_jobs)
        stored = sorted(self._copying)
        if self._late is not None and self.scheduler.has_unfinished_requests():
            due = asked.jobs_to_flush or set()
            stored = [job for job in stored if job in due or self._late.random() < 0.2]
        self._copying.difference_update(stored)
        for number in [*asked.load_jobs, *stored]:
            done.mark_completed(number)
        loaded = {job.req_id for job in asked.load_jobs.values()}
        return KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=done)

    def image(self, name: str) -> list[MultiModalFeatureSpec]:
        """An image whose placeholder is the prompt's second block."""
        return [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(SIZE, SIZE), name)]

    def settle(self) -> None:
        """Wait until files are written and read; publish what has happened."""
        tiers = getattr(self._offloading, "secondary_tiers", ())
        for tier in tiers:
            tier.drain_jobs()
        self.flush()
        self.flush()

    @property
    def _offloading(self) -> Any:
        return getattr(getattr(self.connector, "connector_scheduler", None), "manager", None)

    def lookup(self, tokens: list[int], key: Any) -> None:
        """The blocks that a request with this prompt and a further token would find."""
        request = self.request([*tokens, 9999], key)
        manager = self.scheduler.kv_cache_manager
        _, device, *_ = manager.get_computed_blocks(request)
        below = [0, 0]
        if self.connector is not None:
            self.connector.on_new_request(request)
            below = self._below(request, device)
            self.connector.request_finished(request, [])
        self._writer.lookup(tokens, key.salt, device, *below)

    def _below(self, request: Request, device: int) -> list[int]:
        """Tokens that the connector would load: from the host alone, then from files."""
        simple = getattr(self.connector, "scheduler_manager", None)
        if simple is not None:
            found = self.connector.get_num_new_matched_tokens(request, device)[0]
            return [0, found] if simple.kv_event_medium == "STORAGE" else [found, 0]
        secondary = list(getattr(self._offloading, "secondary_tiers", ()))
        if not secondary:
            return [self.connector.get_num_new_matched_tokens(request, device)[0] or 0, 0]
        self._offloading.secondary_tiers[:] = []
        host = self.connector.get_num_new_matched_tokens(request, device)[0] or 0
        self._offloading.secondary_tiers[:] = secondary
        names = secondary[0].file_mapper.get_file_name
        state = self.connector.connector_scheduler._req_status[request.request_id]
        keys = state.group_states[0].offload_keys
        first = (device + host) // SIZE
        files = next(
            (n for n, k in enumerate(keys[first:]) if not Path(names(k)).exists()),
            len(keys) - first,
        )
        return [host, SIZE * files]

    def reset(self, connector: bool) -> None:
        assert self.scheduler.reset_prefix_cache(reset_connector=connector)
        self.flush()

    def flush(self) -> None:
        """A step without requests, which publishes what has happened."""
        planned = self.scheduler.schedule()
        copied = self._transfers(planned)
        output = replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=copied)
        self.scheduler.update_from_output(planned, output)

    def close(self) -> None:
        self.scheduler.shutdown()

    def _publish(self, batch: Any) -> None:
        batch.ts, batch.data_parallel_rank = 1.0, self._rank
        self._writer.message(ENCODER.encode(batch))
