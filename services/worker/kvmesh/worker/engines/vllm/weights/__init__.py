"""vLLM's load format `kvmesh`: weights from other workers, or from the memory of the node."""
