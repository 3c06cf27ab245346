"""`kvmesh plan learned` shows each learner with its gain over its fallback."""

from io import StringIO

import pytest
from rich.console import Console

from kvmesh.bus.messages import LearnerReport
from kvmesh.cli.learned import Learned, line, render
from kvmesh.frontend.sessions.speculation_gate import FollowUp, FollowUpFamily, SpeculationGate

SPEEDS = LearnerReport(
    model="m",
    learner="speeds",
    fallback="equal speeds",
    observations=1234,
    held_out=40.4,
    measure="factor by which expected times are wrong",
    own=1.25,
    other=2.5,
    gain=0.5,
    reason="they expect better",
)


def speculations(share: float) -> list[LearnerReport]:
    gate = SpeculationGate("auto")
    family = FollowUpFamily("m", "claude-code", False)
    for _ in range(20):
        gate.record(FollowUp(family, "tools"), 1000, int(1000 * share))
    assert gate.models == {"m"}
    assert list(gate.report("other")) == []
    return list(gate.report("m"))


def test_the_gate_of_speculations_tells_its_gain_and_why_it_is_off() -> None:
    [pays], [wastes] = speculations(1.0), speculations(0.4)
    assert (pays.on, pays.gain) == (True, 1.0)
    assert (wastes.on, wastes.about) == (False, "claude-code, results of tools, without thinking")
    assert wastes.gain == pytest.approx(-0.2)
    assert "fewer than 90%" in wastes.reason


def test_the_table_and_the_line_name_every_learner() -> None:
    found = [Learned("router-0", SPEEDS), *(Learned("f", each) for each in speculations(0.4))]
    console = Console(width=220, record=True, file=StringIO())
    console.print(render(found))
    text = console.export_text()
    assert "1,234" in text
    assert "equal speeds 2.5" in text
    assert "+50 %" in text
    assert "(f)" in text
    assert line(found) == "speeds +50 %, speculation off"
    assert line([]) == ""
