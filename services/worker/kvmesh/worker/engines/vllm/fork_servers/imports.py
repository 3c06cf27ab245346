"""Imports of vLLM's processes, before they know the model."""

from importlib import import_module

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.compilation.backends",
    "vllm.model_executor.model_loader",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "kvmesh.worker.engines.vllm.plugin.general",
    "kvmesh.worker.engines.vllm.weights.loader",
    "torch._dynamo",
    "torch._inductor.compile_fx",
)


def import_vllm() -> None:
    """Import modules that take no device; raises RuntimeError if one has taken it."""
    import torch

    for module in MODULES:
        import_module(module)
    from vllm.platforms import current_platform

    import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("an import has initialised CUDA, which a fork cannot use")
