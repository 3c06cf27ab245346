"""Abilities in which engines differ: those declared here, and those of a started engine."""

from kvmesh.worker.capabilities import (
    AdapterLoading,
    Parkable,
    Prefetching,
    ReadingImages,
    Releasing,
    Retaining,
    RoleSwitching,
    Sleeping,
    Tiered,
)
from kvmesh.worker.engine import Engine, EngineInfo

DIRECTIVES = "retention directives"
OUTCOMES = "outcomes, pins, clearing by namespace"
RELEASE = "release of sessions"
PREFETCH = "prefetch"
TIERS = "lower tiers"
HANDOFF = "handoff of prompts"
ROLES = "change of role at run time"
ADAPTERS = "adapters at run time"
TAGS = "structural tags"
PARKING = "[parking](workers.md#parked-workers)"
IMAGES = "[images](images.md)"
SLEEP = "[sleep](workers.md#sleeping-workers)"
ABILITIES = (
    *(DIRECTIVES, OUTCOMES, RELEASE),
    *(PREFETCH, TIERS, HANDOFF, ROLES, ADAPTERS, TAGS, IMAGES, PARKING, SLEEP),
)

ALWAYS = "yes"
PLUGIN = "with [the plugin](vllm-plugin.md)"
# Of each engine, with the condition of each ability, in Markdown.
DECLARED: dict[str, dict[str, str]] = {
    "mock": {
        **dict.fromkeys(
            (DIRECTIVES, OUTCOMES, RELEASE, PREFETCH, HANDOFF, ROLES, TAGS, PARKING, SLEEP), ALWAYS
        ),
        TIERS: "`mock.host_blocks` or `mock.kvbm`",
        ADAPTERS: "`worker.max_adapters`",
        IMAGES: "`mock.image_tokens`",
    },
    "torch": {
        **dict.fromkeys(
            (DIRECTIVES, OUTCOMES, RELEASE, PREFETCH, HANDOFF, ROLES, TAGS, PARKING, SLEEP), ALWAYS
        ),
        TIERS: "a [block manager](kvbm.md) on its node",
    },
    "vllm": {
        **dict.fromkeys((DIRECTIVES, OUTCOMES, RELEASE), "`vllm.retention`, the default"),
        TIERS: "`vllm.kvbm` or vLLM's `kv_offloading_size`",
        **dict.fromkeys((HANDOFF, ROLES), "`worker.serves`"),
        ADAPTERS: "`worker.max_adapters`",
        **dict.fromkeys((PREFETCH, TAGS), ALWAYS),
        IMAGES: "a model that reads them",
        PARKING: "all ranks on its machine",
        SLEEP: "vLLM's `enable_sleep_mode`, on GPUs",
    },
    "openai": {
        **dict.fromkeys((DIRECTIVES, OUTCOMES, RELEASE), PLUGIN),
        TIERS: "`remote.kvbm` or vLLM's `--kv-offloading-size`",
        PREFETCH: "vLLM's `--enable-prompt-tokens-details`",
        ADAPTERS: "vLLM's `VLLM_ALLOW_RUNTIME_LORA_UPDATING`",
        TAGS: ALWAYS,
        IMAGES: "vLLM's `--enable-scale-out`",
    },
    "sglang": {
        RELEASE: "`enable_session_radix_cache`",
        HANDOFF: "`worker.serves`",
        TAGS: ALWAYS,
    },
    "trtllm": {
        DIRECTIVES: ALWAYS,
        HANDOFF: "`worker.serves`",
        TAGS: "`guided_decoding_backend=xgrammar`",
    },
}


def abilities(engine: Engine, info: EngineInfo) -> set[str]:
    """The abilities of a started engine under its settings.

    An engine that loads adapters at run time, or releases sessions, may still need a setting.
    """
    tests = {
        DIRECTIVES: info.reports_outcomes or info.retention == "honoured",
        OUTCOMES: info.reports_outcomes,
        RELEASE: info.reports_outcomes
        or (isinstance(engine, Releasing) and not isinstance(engine, Retaining)),
        PREFETCH: isinstance(engine, Prefetching),
        TIERS: isinstance(engine, Tiered) and engine.tier_counts() is not None,
        HANDOFF: info.supports_handoff,
        ROLES: info.supports_handoff and isinstance(engine, RoleSwitching),
        ADAPTERS: isinstance(engine, AdapterLoading),
        TAGS: info.structural_tags,
        IMAGES: bool(info.image_placeholder) and isinstance(engine, ReadingImages),
        PARKING: isinstance(engine, Parkable),
        SLEEP: isinstance(engine, Sleeping) and not engine.cannot_sleep(),
    }
    return {ability for ability, has in tests.items() if has}


def markdown() -> str:
    """The table of what each engine honours, for the documentation."""
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in DECLARED)} |",
        f"| --- |{' --- |' * len(DECLARED)}",
    ]
    for ability in ABILITIES:
        cells = (declared.get(ability, "–") for declared in DECLARED.values())
        lines.append(f"| {ability} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def undeclared(engine: Engine, info: EngineInfo) -> set[str]:
    """Abilities that a started engine has and does not declare, or lacks and declares always."""
    found, declared = abilities(engine, info), DECLARED[info.name]
    always = {ability for ability, condition in declared.items() if condition == ALWAYS}
    return (found - set(declared)) | (always - found)


if __name__ == "__main__":
    print(markdown(), end="")
