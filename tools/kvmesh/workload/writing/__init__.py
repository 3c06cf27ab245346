"""Writers of traces: kvmesh's own spelling, and those of other tools."""
