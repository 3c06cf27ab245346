"""Errors of `kvmesh up`."""


class UpError(Exception):
    """The mesh cannot start; the message gives the reason and the remedy."""
