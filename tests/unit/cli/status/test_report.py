"""The report of a mesh."""

import asyncio
import logging
from unittest.mock import Mock

import pytest

from kvmesh.cli.status import report


async def test_requests_that_are_too_many_to_compare_do_not_hold_up_the_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def endless(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(report, "used_aliases", endless)
    monkeypatch.setattr(report, "ALIASES_S", 0.01)
    with caplog.at_level(logging.WARNING):
        assert await report._aliases(Mock()) == []
    assert "`kvmesh model alias` reads them" in caplog.text
