"""What can go wrong when block bytes move between processes."""

from typing import Literal, TypeAlias

Code: TypeAlias = Literal[
    "unavailable", "unreachable", "busy", "refused", "revoked", "lost", "timeout", "failed"
]


class TransferError(Exception):
    """Bytes were not moved; what the destination holds now means nothing.

    `code`: "unavailable" (this process cannot transfer that way), "unreachable" (nobody listens at
    `peer`), "busy", "refused" (a range that was not granted), "revoked" (no such grant any more),
    "lost" (the connection broke), "timeout", "failed" (the transport says why). Unless `settled`,
    bytes may still arrive in the destination: it must not be used for anything else.
    """

    def __init__(self, code: Code, peer: str, detail: str, settled: bool = True) -> None:
        super().__init__(f"{peer}: {detail}" if peer else detail)
        self.code = code
        self.peer = peer
        self.detail = detail
        self.settled = settled
