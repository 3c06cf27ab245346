"""LoRA adapters of a worker: their folders, and loading and unloading while it runs."""
