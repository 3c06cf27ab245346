"""The answer of a weights process to a loader, in a file: the place of the weights."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.weights.errors import WeightsLost

POLL_S = 0.02


class WeightsAnswer(Struct, frozen=True, omit_defaults=True):
    """Read the copy with `digest` from the store in `directory`, or, because of `disk`, the disk.

    A copy may still be on its way: `StoredCopy.wait` waits for chunks.
    """

    digest: str = ""
    directory: str = ""
    disk: str = ""


@dataclass(frozen=True)
class WeightsAccess:
    """Access of an engine's loader to weights.

    `answer_file` holds a WeightsAnswer within `timeout_s` seconds from the start of the worker's
    weights process; `directory` and `max_bytes` are those of the node's store. Copies that the
    loader makes there are to be kept with `keep`.
    """

    answer_file: Path
    directory: Path
    max_bytes: int
    keep: bool
    timeout_s: float


def write_answer(file: Path, answer: WeightsAnswer) -> None:
    """Show an answer to loaders, whole or not at all; raises OSError."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    new.write_bytes(msgspec.json.encode(answer))
    new.rename(file)


def read_answer(file: Path) -> WeightsAnswer | None:
    """The answer, or None if there is none yet; raises WeightsLost if it is malformed."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=WeightsAnswer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsLost(f"cannot read {file}: {error}") from error


def wait_for_answer(file: Path, timeout: float) -> WeightsAnswer:
    """Block until there is an answer; raises WeightsLost after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (answer := read_answer(file)) is None:
        if time.monotonic() > deadline:
            raise WeightsLost(f"no weights process has answered in {timeout:g} s")
        time.sleep(POLL_S)
    return answer
