"""The connector `command`: its command line and the JSON of `state`."""

from pathlib import Path

import pytest

from kvmesh.planner.connectors.command import CommandConnector
from kvmesh.planner.connectors.interface import ConnectorError, PoolState
from kvmesh.planner.errors import PlannerConfigError

TIMEOUT_S = 30.0


def printing(folder: Path, output: str) -> CommandConnector:
    file = folder / "output"
    file.write_text(output)
    return CommandConnector(f"/bin/sh -c 'cat \"$0\"' '{file}'", TIMEOUT_S)


async def test_a_pool_is_a_number_or_an_object(tmp_path: Path) -> None:
    connector = printing(tmp_path, '{"a": 2, "b": {"wanted": 1, "workers": ["w"], "more": 0}}')
    assert await connector.state() == {"a": PoolState(2), "b": PoolState(1, ("w",))}


@pytest.mark.parametrize(
    "output", ["", "fine", "[1]", '{"a": "2"}', '{"a": {}}', '{"a": {"wanted": 1, "workers": 3}}']
)
async def test_other_output_is_an_error(tmp_path: Path, output: str) -> None:
    with pytest.raises(ConnectorError, match="state printed no valid JSON object"):
        await printing(tmp_path, output).open()


async def test_numbers_and_names_are_arguments(tmp_path: Path) -> None:
    file = tmp_path / "arguments"
    connector = CommandConnector(f'/bin/sh -c \'printf "%s|" "$@" > {file}\' name', TIMEOUT_S)
    await connector.scale({"a": 2, "b": 0}, stop=["w 1", "--x"])
    assert file.read_text() == "scale|a=2|b=0|--stop|w 1|--x|"
    await connector.scale({"a": 3})
    assert file.read_text() == "scale|a=3|"


@pytest.mark.parametrize(("command", "reason"), [("", "needs planner.command"), ("'", "quotation")])
def test_an_unusable_command_is_refused(command: str, reason: str) -> None:
    with pytest.raises(PlannerConfigError, match=reason):
        CommandConnector(command, TIMEOUT_S)
