"""Processes of the tests of fork servers, which import this module by its name."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

from kvmesh.worker.engines.vllm.fork_servers.servers import adopt

AHEAD = "colorsys"  # a module that nothing else imports
SPAWN = multiprocessing.get_context("spawn")


def tell(channel: Connection) -> None:
    """Send facts about this process, then wait for an exit code."""
    channel.send(
        {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "ahead": AHEAD in sys.modules,
            "folder": os.getcwd(),
            "name": multiprocessing.current_process().name,
            "value": os.environ.get("VALUE"),
        }
    )
    sys.exit(channel.recv())


def tell_of_child(channel: Connection) -> None:
    """Be a process of vLLM: adopt the servers, and pass on what a process of one's own tells."""
    adopt()
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=tell, args=(there,))
    child.start()
    channel.send({**here.recv(), "of": os.getpid()})
    here.send(0)
    child.join()
    sys.exit(channel.recv())
