"""Fidelity tests use the mesh tests' NATS server."""

from mesh.conftest import nats_server

__all__ = ["nats_server"]
