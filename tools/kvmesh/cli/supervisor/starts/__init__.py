"""Progress of the processes of `kvmesh up` that start."""
