"""Commands that run a mesh or one of its processes."""
