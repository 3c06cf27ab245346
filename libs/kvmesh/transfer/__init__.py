"""Transfer of block bytes between the memories of two processes, over NIXL or TCP."""

from kvmesh.transfer.errors import TransferError
from kvmesh.transfer.grants import Grant, Region
from kvmesh.transfer.transport import Transport

__all__ = ["Grant", "Region", "TransferError", "Transport"]
