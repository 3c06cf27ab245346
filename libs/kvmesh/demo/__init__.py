"""The model folder that ships with the mesh: a real tokenizer and chat template, no weights."""

from pathlib import Path

NAME = "kvmesh-demo"


def model_dir() -> Path:
    """A Hugging Face model folder for the mock engine; `kvmesh.demo.train` made it."""
    return Path(__file__).parent / NAME
