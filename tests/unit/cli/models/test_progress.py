"""Lines about long steps."""

import asyncio

import pytest

from kvmesh.cli.models import progress
from kvmesh.cli.models.progress import BytesProgress, told


async def test_a_long_step_is_told_with_its_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "TELL_S", 0.001)
    lines = ""
    async with told("reading ./m"):
        while "so far" not in lines:
            await asyncio.sleep(0.001)
            lines += capsys.readouterr().err
    assert lines.startswith("reading ./m: 0s so far\n")


def test_bytes_are_told_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = BytesProgress("pushed")
    shown.show(1, 2048)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "TELL_S", 0.0)
    shown.show(1024, 2048)
    assert capsys.readouterr().err == "pushed 1.0 KiB of 2.0 KiB, 0s so far\n"
