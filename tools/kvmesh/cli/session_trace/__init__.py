"""`kvmesh explain trace`: the requests of a session and of its subagents, over time."""
