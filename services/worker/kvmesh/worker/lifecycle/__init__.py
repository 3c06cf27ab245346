"""The states of a worker on the mesh: it serves, is on standby, and serves again."""
