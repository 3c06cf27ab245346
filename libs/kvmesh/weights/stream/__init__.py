"""The decisions of a process that takes a copy of weights from several sources. Pure.

`StreamPlan` says which chunk to ask of which source next. Its caller passes the time, does all
input and output, and reports back.
"""

from kvmesh.weights.stream.options import FetchOptions
from kvmesh.weights.stream.plan import ChunkRequest, Failure, StreamPlan
from kvmesh.weights.stream.source import SourceState

__all__ = ["ChunkRequest", "Failure", "FetchOptions", "SourceState", "StreamPlan"]
