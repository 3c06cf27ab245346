"""`kvmesh backup` and `kvmesh backup restore`: what only the mesh's store holds, in a file."""
