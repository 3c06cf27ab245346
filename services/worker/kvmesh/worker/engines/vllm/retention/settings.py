"""vLLM's `kv_transfer_config` for the connector that retains blocks."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.token_ranges import DEFAULTS
from kvmesh.worker.adapters.request_origin import KEY
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.engines.vllm.transfer_config import PACKAGE

CONNECTOR = "KvmeshRetentionConnector"
MODULE = f"{PACKAGE}.retention.connector"
OUTCOMES, STATE = "retention_outcomes", "retention_state"
KEPT = "kept"  # of a clear: `ClearOutcome.kept`
PROMPT, DECODE = "prompt", "decode"
LOADED = "loaded"  # of a request: tokens from each tier, from tier 1 on
TELLS_TIERS = "tells_tiers"  # the server knows the tiers of a request's cached tokens
PREFILL_STEPS = "prefill_steps"


class QueryState(Struct, frozen=True, tag="state"):
    """Query of the state alone."""


class QueryOutcomes(Struct, frozen=True, tag="outcomes"):
    """Query of the outcomes of a recent request, by its id outside of vLLM's engine."""

    request: str


class ConnectorOptions(Struct, frozen=True, kw_only=True):
    """`RetentionOptions` as vLLM passes them to the connector; `defaults` are (level, ttl_s)."""

    budget: Annotated[float, Meta(ge=0, le=1)] = RetentionOptions.budget
    session_idle_s: Annotated[float, Meta(gt=0)] = RetentionOptions.session_idle_s
    session_blocks: Annotated[int, Meta(ge=0)] = RetentionOptions.session_blocks
    defaults: dict[str, tuple[int, float | None]] = field(default_factory=lambda: _pairs(DEFAULTS))

    @property
    def retention(self) -> RetentionOptions:
        defaults = {kind: RetentionWish(*wish) for kind, wish in self.defaults.items()}
        return RetentionOptions(
            budget=self.budget,
            session_idle_s=self.session_idle_s,
            session_blocks=self.session_blocks,
            defaults=defaults,
        )


def retention_transfer_config(options: RetentionOptions) -> dict[str, Any]:
    """`kv_transfer_config` for `KvmeshRetentionConnector`."""
    connector_options = ConnectorOptions(
        budget=options.budget,
        session_idle_s=options.session_idle_s,
        session_blocks=options.session_blocks,
        defaults=_pairs(options.defaults),
    )
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {KEY: msgspec.to_builtins(connector_options)},
    }


def _pairs(defaults: Mapping[str, RetentionWish]) -> dict[str, tuple[int, float | None]]:
    return {kind: (wish.level, wish.ttl_s) for kind, wish in defaults.items()}
