"""What can go wrong when a mesh is started."""


class UpError(Exception):
    """The mesh cannot start; the message says why and what to do."""
