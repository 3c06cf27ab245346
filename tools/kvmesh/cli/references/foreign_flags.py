"""Flags of Dynamo, vLLM, SGLang and former releases, and what is so here: for errors about them."""

from collections.abc import Collection, Iterable

from kvmesh.settings import OptionKey, options
from kvmesh.settings.load import REMOVED

# An option here, or an explanation where there is none.
FOREIGN: dict[str, OptionKey | str] = {
    **{f"--{'-'.join(key).replace('_', '-')}": told for key, told in REMOVED.items()},
    **{f"--{key.replace('_', '-')}": told for (_, key), told in REMOVED.items()},
    # Dynamo's frontend and router
    "--router-mode": ("router", "policy"),
    "--kv-overlap-score-weight": ("router", "prefill_weight"),
    "--router-kv-overlap-score-weight": ("router", "prefill_weight"),
    "--overlap-score-weight": ("router", "prefill_weight"),
    "--kv-cache-block-size": ("worker", "block_size"),
    "--router-block-size": ("worker", "block_size"),
    "--kv-events": ("router", "kv_events"),
    "--router-kv-events": ("router", "kv_events"),
    "--use-kv-events": ("router", "kv_events"),
    "--no-kv-events": "--no-router-kv-events of `kvmesh up`, --no-kv-events of `kvmesh router`",
    "--router-ttl": ("router", "approximate_ttl_s"),
    "--router-ttl-secs": ("router", "approximate_ttl_s"),
    "--router-replica-sync": "routers always share their state: run as many as you like",
    "--router-reset-states": ("indexer", "reset_states"),
    "--router-snapshot-threshold": ("indexer", "snapshot_threshold"),
    "--router-max-tree-size": "the index is bounded by the blocks that workers have",
    "--router-prune-target-ratio": "the index is bounded by the blocks that workers have",
    "--router-track-active-blocks": "routers always track active blocks",
    "--no-track-active-blocks": "routers always track active blocks",
    "--router-assume-kv-reuse": "routers count blocks that a rank shares once",
    "--active-decode-blocks-threshold": ("router", "busy_blocks_share"),
    "--active-prefill-tokens-threshold": ("router", "busy_prefill_tokens"),
    "--busy-threshold": ("router", "busy_blocks_share"),
    "--router-queue-policy": ("router", "queue_order"),
    "--router-event-threads": "indexers are processes: `kvmesh up --indexers N`",
    "--enforce-disagg": ("router", "disagg_tokens"),
    "--load-aware": "--policy load-aware, or --router-policy load-aware of `kvmesh up`",
    "--router-load-aware": "--policy load-aware, or --router-policy load-aware of `kvmesh up`",
    "--router-kv-overlap-score-credit": ("router", "overlap_credits"),
    "--router-kv-overlap-score-credit-decay": ("router", "credit_decay"),
    "--router-host-cache-hit-weight": ("router", "overlap_credits"),
    "--router-disk-cache-hit-weight": ("router", "overlap_credits"),
    "--shared-cache-multiplier": ("router", "overlap_credits"),
    "--shared-cache-type": "the kvbms' tiers are shared: `kvmesh up --kvbm`",
    "--router-prefill-load-scale": ("router", "prefill_weight"),
    "--router-decode-active-request-weight": ("router", "request_weight"),
    "--router-temperature": ("router", "temperature"),
    "--router-queue-threshold": ("router", "queue_threshold"),
    "--router-use-kv-events": ("router", "kv_events"),
    "--router-predicted-ttl-secs": ("router", "predicted_ttl_s"),
    "--router-approximate-cache-policy": ("router", "approximate_ttl_s"),
    "--router-track-output-blocks": "routers always track the blocks of answers",
    "--router-track-prefill-tokens": "routers always track prefill tokens",
    "--router-prefill-load-model": ("router", "learn_speeds"),
    "--router-prefill-policy": "one policy places both parts: `router.policy`",
    "--router-decode-policy": "one policy places both parts: `router.policy`",
    "--router-policy-config": "weights and classes are settings: see [router] in the configuration",
    "--router-conditional-disagg": ("router", "disagg_tokens"),
    "--router-conditional-disagg-config": ("router", "disagg_backlog"),
    "--router-session-affinity-mode": "--policy session with --session-mode hard or soft",
    "--router-session-affinity-ttl-secs": ("router", "session_ttl_s"),
    "--enable-session-prefix-index": "sessions are always known to routers",
    "--router-min-initial-workers": "a frontend is ready once a router and a worker are there",
    "--router-tracking-hash": "prompts are known by keyed hashes",
    "--router-tracking-key-file": ("frontend", "tenant_secret"),
    "--router-tracking-key-id": ("frontend", "tenant_secret"),
    "--use-remote-indexer": "indexers are processes of their own",
    "--serve-indexer": "indexers are processes of their own: `kvmesh indexer`",
    "--active-prefill-tokens-threshold-frac": ("router", "busy_prefill_tokens"),
    "--admission-control": ("frontend", "max_in_flight"),
    "--engine-request-limit": ("worker", "max_waiting"),
    "--migration-max-seq-len": ("frontend", "migration_limit"),
    "--http-body-limit-mb": ("frontend", "max_body_bytes"),
    "--http-graceful-shutdown-timeout-secs": ("frontend", "drain_timeout_s"),
    "--http-sse-keep-alive-interval-ms": ("frontend", "keepalive_s"),
    "--http-overload-status-codes": "the APIs' own codes: 429 for OpenAI's, 529 for Messages",
    "--tls-cert-path": "a proxy in front terminates TLS, see docs/security.md",
    "--tls-key-path": "a proxy in front terminates TLS, see docs/security.md",
    "--tls-client-ca-cert-path": "a proxy in front terminates TLS, see docs/security.md",
    "--nats-tls-ca-cert-path": ("nats", "tls_ca"),
    "--nats-tls-client-cert-path": ("nats", "tls_cert"),
    "--nats-tls-client-key-path": ("nats", "tls_key"),
    "--namespace-prefix": ("nats", "namespace"),
    "--response-plane": "NATS alone connects the processes; set its URL with --nats",
    "--file-kv": "NATS alone connects the processes; set its URL with --nats",
    "--kserve-grpc-server": "HTTP only",
    "--enable-anthropic-api": "the Messages API is always served",
    "--strip-anthropic-preamble": "Claude Code's billing line is always dropped",
    "--reasoning-field-name": "`reasoning_content`; requests may return `reasoning`, too",
    "--exclude-tools-when-tool-choice-none": "prompts show the tools always, so they stay cached",
    "--enable-streaming-tool-dispatch": "a call ends its own stream events",
    "--enable-streaming-reasoning-dispatch": "thinking has stream events of its own",
    "--tokenizer": "the tokenizer is the one in the model's folder",
    "--dyn-chat-processor": "templates are rendered in the frontend",
    "--dyn-preprocess-workers": ("frontend", "processes"),
    "--request-trace": ("tracing", "endpoint"),
    "--log": ("log", "level"),
    "--logging-jsonl": ("log", "format"),
    "--system-port": ("worker", "metrics_port"),
    "--disaggregation-mode": ("worker", "serves"),
    "--http-port": ("frontend", "port"),
    "--http-host": ("frontend", "host"),
    "--http-address": ("frontend", "host"),
    "--migration-limit": ("frontend", "migration_limit"),
    "--metrics-prefix": "metrics begin with kvmesh_ (`kvmesh config metrics` lists them)",
    "--namespace": ("nats", "namespace"),
    "--etcd-endpoints": "NATS alone connects the processes; set its URL with --nats",
    "--discovery-backend": "NATS alone connects the processes; set its URL with --nats",
    "--store-kv": "NATS alone connects the processes; set its URL with --nats",
    "--request-plane": "NATS alone connects the processes; set its URL with --nats",
    "--event-plane": "NATS alone connects the processes; set its URL with --nats",
    "--is-prefill-worker": ("worker", "serves"),
    "--is-decode-worker": ("worker", "serves"),
    "--dyn-tool-call-parser": ("worker", "tool_parser"),
    "--dyn-reasoning-parser": ("worker", "reasoning_parser"),
    "--custom-jinja-template": "put the template into the model's folder, as chat_template.jinja",
    "--speedup-ratio": ("mock", "speedup"),
    "--num-gpu-blocks-override": "--vllm-args num_gpu_blocks_override=N, or --mock-blocks N",
    "--planner-profile-data": ("mock", "profile"),
    "--num-workers": ("up", "workers"),
    "--adjustment-interval": ("planner", "interval_s"),
    "--load-predictor": ("planner", "predictor"),
    # vLLM and SGLang
    "--served-model-name": ("worker", "served_name"),
    "--model-name": ("worker", "served_name"),
    "--model-path": ("worker", "model"),
    "--max-model-len": ("worker", "context"),
    "--context-length": ("worker", "context"),
    "--page-size": ("worker", "block_size"),
    "--tool-call-parser": ("worker", "tool_parser"),
    "--reasoning-parser": ("worker", "reasoning_parser"),
    "--enable-auto-tool-choice": "tools are always parsed, by the model's dialect or --tool-parser",
    "--chat-template": "put the template into the model's folder, as chat_template.jinja",
    "--api-key": "`kvmesh keys add NAME` makes keys",
    "--ssl-keyfile": "a proxy in front terminates TLS, see docs/security.md",
    "--allowed-origins": ("frontend", "cors_origins"),
    "--max-num-seqs": "--vllm-args max_num_seqs=N, --torch-max-sequences or --mock-max-sequences",
    "--max-num-batched-tokens": (
        "--vllm-args max_num_batched_tokens=N, --torch-max-batched-tokens or"
        " --mock-max-batched-tokens"
    ),
    "--lora-modules": ("vllm", "adapters"),
    "--lora-paths": ("vllm", "adapters"),
    "--enable-prefix-caching": "prefix caching is on with every engine",
    "--enable-lora": ("worker", "max_adapters"),
    "--max-loras": ("worker", "max_adapters"),
    "--max-loras-per-batch": ("worker", "max_adapters"),
    **{
        flag: f"engine arguments of vLLM go into --vllm-args {name}=…"
        for flag, name in (
            ("--tensor-parallel-size", "tensor_parallel_size"),
            ("--tp", "tensor_parallel_size"),
            ("--tp-size", "tensor_parallel_size"),
            ("--pipeline-parallel-size", "pipeline_parallel_size"),
            ("--data-parallel-size", "data_parallel_size"),
            ("--gpu-memory-utilization", "gpu_memory_utilization"),
            ("--mem-fraction-static", "gpu_memory_utilization"),
            ("--quantization", "quantization"),
            ("--dtype", "dtype"),
            ("--kv-cache-dtype", "kv_cache_dtype"),
            ("--enforce-eager", "enforce_eager"),
            ("--enable-chunked-prefill", "enable_chunked_prefill"),
            ("--trust-remote-code", "trust_remote_code"),
            ("--kv-transfer-config", "kv_transfer_config"),
            ("--speculative-config", "speculative_config"),
            ("--swap-space", "swap_space"),
        )
    },
}


def foreign_flag(flag: str, known: Collection[str]) -> str:
    """A suffix for errors about a flag of another project; empty for other flags.

    `known` are the flags of the command, by which an option has one of several names.
    """
    found = FOREIGN.get(flag.replace("_", "-"))
    if found is None:
        return ""
    if isinstance(found, str):
        return f": {found}"
    section, key = found[0], found[1].replace("_", "-")
    own, prefixed = f"--{key}", f"--{section}-{key}"
    for name in (prefixed, own):
        if name in known:
            return f": here {name}"
    command = section if section in ("router", "indexer", "frontend", "up", "planner") else "worker"
    return f": here {own if section == command else prefixed} of `kvmesh {command}`"


DYNAMO = "DYN_"


def foreign_variables(env: Iterable[str]) -> list[str]:
    """One line for each of Dynamo's variables among `env` that says what does the same here.

    Dynamo names them after its flags.
    """
    variables = {(option.section, option.key): option.env for option in options()}
    found = []
    for name in sorted(each for each in env if each.startswith(DYNAMO)):
        named = name.removeprefix(DYNAMO).lower().replace("_", "-")
        entry = FOREIGN.get(f"--{named}") or FOREIGN.get(f"--router-{named}")
        entry = entry or FOREIGN.get(f"--dyn-{named}")
        if entry is not None:
            own = entry if isinstance(entry, str) else f"here {variables[entry]}"
            found.append(f"{name} has no effect: {own}")
    return found
