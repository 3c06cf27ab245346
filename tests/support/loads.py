"""The load of a busy rank."""

from kvmesh.bus.messages import Load

LOAD = Load(
    instance="w",
    rank=1,
    running=3,
    waiting=2,
    active_blocks=40,
    cached_blocks=50,
    total_blocks=100,
    prefill_tokens=7,
    steps=11,
    prompt_tokens=12,
    cached_tokens=13,
    output_tokens=14,
    requests=15,
    step_s=0.5,
)
