"""Scratch folders of killed workers are removed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvmesh.worker.scratch import PREFIX, ScratchFolder


def test_the_next_worker_removes_folders_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}unlocked").mkdir()
    with ScratchFolder() as living:
        code = (
            "import os, signal\n"
            "from kvmesh.worker.scratch import ScratchFolder; made = ScratchFolder()\n"
            "(made.path / 'weights').write_text('…'); print(made.path, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        killed = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        left = Path(killed.stdout.strip())
        assert (left / "weights").exists()
        with ScratchFolder() as other:
            assert not left.exists()
            assert living.path.exists()
        assert not other.path.exists()
    assert not living.path.exists()
