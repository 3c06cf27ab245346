"""Seeded runs of a whole mesh over a bus with the worst behaviour that JetStream permits."""

import gc
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from support.simulation.world import Result, simulate

CHUNK = 20
MANY = 10_000
ROOT = Path(__file__).parents[2]


def report(result: Result) -> str:
    """The command to repeat the run, and the run's log."""
    again = f".venv/bin/pytest tests/simulation -k one_seed --seed {result.seed}"
    return "\n".join([str(result), *result.log, f"digest {result.digest}; repeat: {again}"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", range(0, metafunc.config.getoption("--seeds"), CHUNK))


def test_the_mesh_heals_and_answers_each_request_once(
    first: int, pytestconfig: pytest.Config
) -> None:
    last = min(first + CHUNK, pytestconfig.getoption("--seeds"))
    for seed in range(first, last):
        result = simulate(seed)
        assert not result.broken, report(result)


def test_one_seed(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    """The seed given by `--seed`, with its whole log."""
    seed = pytestconfig.getoption("--seed")
    if seed is None:
        pytest.skip("no --seed is given")
    result = simulate(seed)
    with capsys.disabled():
        print(report(result))
    assert not result.broken


def collect_rarely() -> None:
    """Collect garbage rarely: a seed leaves little, and collection takes a fifth of its time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_seeds() -> None:
    with ProcessPoolExecutor(os.cpu_count(), initializer=collect_rarely) as pool:
        for result in pool.map(simulate, range(MANY), chunksize=CHUNK):
            assert not result.broken, report(result)


def test_a_seed_replays_to_the_byte_in_any_process() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests'); from support.simulation.world import simulate;"
    )
    script += "print(simulate(7).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for number in ("1", "2")
    }
    assert digests == {simulate(7).digest}
    assert simulate(8).digest not in digests
