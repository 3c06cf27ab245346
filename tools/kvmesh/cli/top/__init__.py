"""`kvmesh top`: the workers, sessions and tenants of a mesh, live in a terminal."""
