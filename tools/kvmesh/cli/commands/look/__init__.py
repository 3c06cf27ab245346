"""Commands that show the state of a mesh and its requests."""
