"""kvmesh in a vLLM server of its own: retention without a mesh, by vLLM's plugin interfaces."""
