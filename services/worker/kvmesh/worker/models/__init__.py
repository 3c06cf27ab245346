"""The model folder of a worker: a given one, one of the mesh, or a default."""
