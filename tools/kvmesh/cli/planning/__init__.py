"""The actions of `kvmesh plan`."""
