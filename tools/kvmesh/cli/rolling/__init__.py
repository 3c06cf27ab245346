"""`kvmesh fleet roll`: replaces the processes of a service one at a time."""
