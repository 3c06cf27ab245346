"""The load that a rank with a scheduler of its own reports."""

from kvmesh.bus.messages import Load
from kvmesh.worker.enginecore.counters import EngineCounters
from kvmesh.worker.enginecore.scheduler import Scheduler


def rank_load(
    instance: str,
    rank: int,
    scheduler: Scheduler,
    counters: EngineCounters,
    load_ratio: float,
    transferring: int = 0,
) -> Load:
    """The load of `rank`; `transferring` requests, which the scheduler does not have yet, wait."""
    blocks, decoding = scheduler.blocks, scheduler.decoding
    return Load(
        instance=instance,
        rank=rank,
        running=scheduler.running,
        waiting=scheduler.waiting_count + transferring,
        active_blocks=blocks.active,
        cached_blocks=blocks.cached,
        total_blocks=blocks.capacity,
        prefill_tokens=scheduler.prefill_tokens,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        output_tokens=counters.output_tokens,
        requests=counters.requests,
        preemptions=scheduler.preemptions,
        aborted=counters.aborted,
        step_s=counters.step_s,
        busy_s=counters.busy_s,
        computed_tokens=counters.computed_tokens,
        decoding=len(decoding.members),
        decode_tokens=decoding.kv_tokens,
        decode_var=decoding.kv_variance,
        waiting_tokens=scheduler.waiting_tokens,
        waiting_var=scheduler.waiting_variance,
        prefill_steps=counters.prefill_steps,
        load_ratio=load_ratio,
    )
