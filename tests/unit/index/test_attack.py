"""Keys that a client chose so that they pile up in the index's hash tables."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("probes") / "probes"
    options = ["-std=c++20", "-O1", f"-I{ROOT / 'libs/native'}"]
    sources = [ROOT / "tests/native/probes.cpp", ROOT / "libs/native/table_memory.cpp"]
    subprocess.run(["c++", *options, *map(str, sources), "-o", str(built)], check=True)
    return built


def measured(program: Path) -> dict[str, list[float]]:
    """Mean probes in the map and in the table, and the fullest shard's share, by kind of keys."""
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in output.splitlines()]
    return {kind: [float(figure) for figure in figures] for kind, *figures in lines}


def test_chosen_keys_cost_no_more_probes_than_random_ones(program: Path) -> None:
    found = measured(program)
    assert {"random", "upper", "multiplied", "lower"} == found.keys()
    for figures in found.values():
        in_map, in_table, shard = figures
        assert in_map < 3
        assert in_table < 1
        assert shard < 0.01


def test_each_process_scatters_keys_in_its_own_way(program: Path) -> None:
    assert measured(program) != measured(program)
