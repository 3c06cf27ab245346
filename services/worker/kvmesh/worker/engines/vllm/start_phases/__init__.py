"""Phases of vLLM's start, which its processes tell the worker that has started them."""

from kvmesh.worker.engines.vllm.start_phases.sender import enter, record

__all__ = ["enter", "record"]
