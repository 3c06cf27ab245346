"""Digests of the chunks of small files."""

from pathlib import Path

from blake3 import blake3

from kvmesh.weights.manifest import CHUNK_BYTES


def chunk_digests(file: Path, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """The digests of a file's chunks, as a manifest has them; raises OSError."""
    digests = []
    with file.open("rb") as content:
        while chunk := content.read(chunk_bytes):
            digests.append(blake3(chunk).digest())
    return b"".join(digests)
