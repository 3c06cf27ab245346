"""The benchmark of what a GPU changes, at its small scale on the CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def benchmark(parts: str, json_file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--parts", parts]
    command += ["--prefix", "64", "--json", str(json_file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_each_figure_has_a_baseline_of_the_same_run(tmp_path: Path) -> None:
    done = benchmark("copies,torch", tmp_path / "figures.json")
    assert not done.returncode, done.stderr[-2000:]
    content = json.loads((tmp_path / "figures.json").read_text())
    assert "failed" not in content["summary"], done.stderr[-2000:]
    rows = {row["name"]: row for row in content["rows"]}
    assert all(row["value"] > 0 for row in rows.values())
    bare = {name.split(",")[0] for name, row in rows.items() if not row["baseline"]}
    assert bare == {
        "plain copy to the host",
        "plain copy to the device",
        "torch: TTFT of 64 tokens",
    }
    for who in ("torch engine", "vLLM's connector", "vLLM's connector, scattered"):
        for way in ("to the host", "to the device"):
            assert rows[f"{who}, blocks of 2 MiB, {way}"]["target"] == "≥ 85% of it"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_parts_that_need_vllm_say_so(tmp_path: Path) -> None:
    done = benchmark("retention", tmp_path / "figures.json")
    assert done.returncode
    assert "retention needs vLLM in this environment" in done.stderr
