"""KV connectors in vLLM that are not kvmesh's own, and their combination with those that are."""
