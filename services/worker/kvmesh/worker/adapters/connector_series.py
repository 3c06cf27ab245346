"""Prometheus series of a vLLM server that shares blocks through the kvbm, without `_total`."""

WRITTEN, SKIPPED, CORRUPT = "written_blocks", "skipped_blocks", "corrupt_blocks"
LOADED, LOAD_RATIO = "loaded", "load_ratio"
LOADED_SERIES = "kvmesh_vllm_loaded_blocks"
KVBM_COUNTERS = {key: f"kvmesh_vllm_{key}" for key in (WRITTEN, SKIPPED, CORRUPT)}
