"""`kvmesh backup` and `kvmesh restore`: what only the mesh's store holds, in a file."""
