"""The lives of a worker on the mesh: parked, serving, asleep, serving again."""
