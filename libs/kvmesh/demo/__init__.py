"""The demo model folder: a real tokenizer and chat template, without weights."""

from pathlib import Path

NAME = "kvmesh-demo"


def model_dir() -> Path:
    """Return the Hugging Face model folder for the mock engine, made by `kvmesh.demo.train`."""
    return Path(__file__).parent / NAME
