"""Actions of `kvmesh model` on the mesh's models and on those of this machine."""
