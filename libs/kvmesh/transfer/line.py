"""Reads from threads, one after another over one connection, for readers that check the bytes."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvmesh.bus.messages import MessageDecoder
from kvmesh.transfer.channel import (
    LENGTH_BYTES,
    MAX_UNAUTHENTICATED,
    Descriptor,
    TransferReply,
    Want,
    encode_message,
)
from kvmesh.transfer.errors import Code, TransferError
from kvmesh.transfer.memory_ranges import Piece, pack

_replies = MessageDecoder(TransferReply)
QUIET_S = 3.0  # an owner that sends nothing for so long is frozen or gone


class Line:
    """A connection to one owner, made by the first read and again after an error.

    It is used by one thread at a time. The grants stay valid: bytes may come from an owner that
    has revoked a grant meanwhile, so the reader must verify them.
    """

    def __init__(self, owner: Descriptor, quiet_s: float = QUIET_S) -> None:
        self._owner = owner
        self._quiet_s = quiet_s
        self._socket: socket.socket | None = None
        self._cut = False

    def read(
        self, token: bytes, offset: int, into: memoryview, direct: bool = False
    ) -> TransferReply:
        """Fill `into` from `offset` of a grant; blocks. Raises TransferError.

        With `direct` the owner may reply with its agent: then `into` is to be filled through NIXL.
        """
        ranges = pack([Piece(offset, 0, len(into))])
        want = encode_message(Want(token, ranges, direct, checked=True))
        reply = self._asked_again(want) if self._socket is not None else None
        with self._raising():
            if reply is None:
                reply = self._ask(want)
            if reply.agent and not direct:
                reason = "permission for a direct read that was not asked for"
                raise TransferError("failed", self._owner.address, reason)
            assert self._socket is not None
            if not reply.agent:
                self._fill(self._socket, into)
        return reply

    def _asked_again(self, want: bytes) -> TransferReply | None:
        """Ask over the connection of the last read; None if its owner has closed it."""
        try:
            with self._raising():
                return self._ask(want)
        except TransferError as error:
            if error.code != "lost" or self._cut:
                raise
            return None

    def _ask(self, want: bytes) -> TransferReply:
        sock = self._connected()
        sock.sendall(want)
        reply = self._reply(sock)
        if reply.code:
            raise TransferError(reply.code, self._owner.address, reply.detail)
        return reply

    def cut(self) -> None:
        """End the line, and a read that runs in another thread; it connects no more."""
        self._cut = True
        if (sock := self._socket) is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # not connected yet, or not any more
                return

    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def _connected(self) -> socket.socket:
        if self._socket is None and not self._cut:
            host, port = self._owner.host, self._owner.port
            self._socket = sock = socket.create_connection((host, port), self._quiet_s)
            sock.setblocking(True)
            seconds = int(self._quiet_s)
            limit = struct.pack("ll", seconds, int((self._quiet_s - seconds) * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._cut or self._socket is None:
            raise TransferError("lost", self._owner.address, "the read was ended")
        return self._socket

    def _reply(self, sock: socket.socket) -> TransferReply:
        head = bytearray(LENGTH_BYTES)
        self._fill(sock, memoryview(head))
        size = int.from_bytes(head, "big")
        if size > MAX_UNAUTHENTICATED:
            raise TransferError("failed", self._owner.address, f"a reply of {size} bytes")
        body = bytearray(size)
        self._fill(sock, memoryview(body))
        return _replies.decode(body)

    def _fill(self, sock: socket.socket, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
            if not count:
                raise TransferError("lost", self._owner.address, "the connection ended")
            done += count

    @contextmanager
    def _raising(self) -> Iterator[None]:
        """Translate errors, after which the connection is of no use."""
        peer = self._owner.address
        connected = self._socket is not None
        try:
            yield
        except TransferError:
            self.close()
            raise
        except msgspec.MsgspecError as error:
            self.close()
            raise TransferError("failed", peer, f"a malformed reply: {error}") from error
        except (TimeoutError, BlockingIOError) as error:
            self.close()
            raise TransferError("timeout", peer, f"silent for {self._quiet_s:g} s") from error
        except OSError as error:
            self.close()
            code: Code = "lost" if connected else "unreachable"
            raise TransferError(code, peer, error.strerror or str(error)) from error
