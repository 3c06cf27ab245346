"""vLLM's pooling models: vectors and scores of texts."""
