"""The common interface of what learns in a mesh, and its proof on held-out requests."""
