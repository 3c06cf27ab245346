"""`kvmesh plan learned returns`, and the forecasts in `kvmesh explain --session`."""

import io

from rich.console import Console

from kvmesh.bus.messages import ActiveAgentsReport, Outcome, RestingAgent, ReturnCheck, ReturnClass
from kvmesh.cli.outcomes import show_session
from kvmesh.cli.returns import agent_lines, check_lines, render
from kvmesh.returns.rates import BINS, pack_rates
from kvmesh.terminal.tables import FittedTable

QUICK = pack_rates([2**-7] * BINS)  # exact on the wire
NEVER = pack_rates([0.0] * BINS)


def learned(rates: bytes, *labels: str) -> ReturnClass:
    return ReturnClass(
        model="m", waits=list(labels), prompts=1234.0, returned=20.04, expected=19.0, rates=rates
    )


def lines(table: FittedTable) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=240, highlight=False).print(table)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_each_class_has_its_shares_and_its_median() -> None:
    classes = [
        learned(QUICK, "tool", "Bash", "npm test"),
        learned(NEVER, "end"),
        learned(QUICK),
        learned(b"short", "human"),
    ]
    assert lines(render(classes))[1:] == [
        "m anything 1,234.0 20.0 19.0 8 % 37 % 99 % 100 % 88.72 s",
        "m nothing 1,234.0 20.0 19.0 0 % 0 % 0 % 0 % –",
        "m Bash npm test 1,234.0 20.0 19.0 8 % 37 % 99 % 100 % 88.72 s",
    ]


def test_forecasts_are_compared_with_what_came_true() -> None:
    check = ReturnCheck(model="m", within_s=64.0, expected=1234.56, observed=1200.0)
    (line,) = check_lines([check])
    assert line == "m: forecasts expected 1,234.6 returns within 64 s, 1,200.0 were observed"


def test_agents_that_rest_are_listed_by_their_rest() -> None:
    resting = RestingAgent(session="s", owner="t", tokens=61440, rested_s=12.4, ends_in_s=42.6)
    agents = ActiveAgentsReport(
        model="m", active=8, window=0.75, lost_share=0.012, resting=[resting]
    )
    assert list(agent_lines([agents])) == [
        "m: 8 agents active, 1 rest; 75 % of the memory for contexts; 1.2 % of prompts were lost "
        "between turns",
        "  s of t rests for 12.4 s, 42.6 s more at most; 61,440 tokens",
    ]
    idle = ActiveAgentsReport(model="m", active=0, window=None, lost_share=0.0)
    assert next(iter(agent_lines([idle]))).startswith("m: 0 agents active, 0 rest; no limit for")


def test_a_turn_shows_the_forecast_of_the_finest_class_of_its_model() -> None:
    outcome = Outcome(
        request="r", instance="w-1", time=10.0, cached_tokens=0, output_tokens=1, ttft_s=None,
        total_s=1.0, finish="tool_calls", model="m", waits_for=["tool", "Bash", "npm test"],
    )  # fmt: skip
    classes = [learned(NEVER, "tool"), learned(QUICK, "tool", "Bash")]
    shown = lines(show_session.render([outcome], classes))
    assert shown[0].endswith("returns after in 10 s in 1 min in 10 min half in forecast")
    assert shown[1].endswith("Bash npm test – ~8 % ~37 % ~99 % ~88.72 s –")
    for classes in ([learned(QUICK, "human")], []):
        assert lines(show_session.render([outcome], classes))[1].endswith("npm test – – – – – –")
