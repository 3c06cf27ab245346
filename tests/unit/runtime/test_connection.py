"""A process that may open no more files says so: the loop closes connections without a word."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from kvmesh.runtime.http.connection import Acceptor


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_that_cannot_be_accepted_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        acceptor = Acceptor(Mock(), [listening.fileno()])
        acceptor._accept()
        assert caplog.text == ""
        with socket.create_connection(listening.getsockname()), no_more_files():
            acceptor._accept()
            acceptor._accept()
        acceptor.close()
    (line,) = caplog.messages
    assert line.startswith("new connections are closed: Too many open files; this process may open")
    assert line.endswith("raise its limit (ulimit -n, LimitNOFILE)")
