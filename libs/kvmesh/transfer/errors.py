"""Errors of block transfers."""

from typing import Literal, TypeAlias

Code: TypeAlias = Literal[
    "unavailable", "unreachable", "busy", "refused", "revoked", "lost", "timeout", "failed"
]


class TransferError(Exception):
    """The transfer failed; the content of the destination is undefined.

    `code`: "unavailable" (this process does not have the transport), "unreachable" (no reply at
    `peer`), "busy", "refused" (a range was not granted), "revoked" (the grant has ended), "lost"
    (the connection broke), "timeout", "failed" (an error of the transport). Unless `settled`, bytes
    may still arrive in the destination, which must not be reused.
    """

    def __init__(self, code: Code, peer: str, detail: str, settled: bool = True) -> None:
        super().__init__(f"{peer}: {detail}" if peer else detail)
        self.code = code
        self.peer = peer
        self.detail = detail
        self.settled = settled
