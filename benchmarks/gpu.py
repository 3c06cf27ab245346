"""All that a GPU changes, in one command, each figure beside its baseline of the same run.

    python benchmarks/gpu.py [--device cuda|cpu] [--model FOLDER | --random 8b] [--parts …]

- `copies`: the copies of the torch engine and of vLLM's connector between blocks and page-locked
  memory, beside one cudaMemcpyAsync of the same bytes.
- `torch`, `kvbm`: the torch engine and vLLM beside a block manager. The time to the first token of
  a prompt computed, cached, and loaded from the host, also beside requests that decode; and what
  these lose meanwhile.
- `retention`: vLLM's own server with retention off and on, under the load of agents and of one-off
  prompts: cached share, time to the first token, tokens per second.

The last two need vLLM in the same environment. With `--device cpu` everything runs at a small
scale on the CPU. Without --model, a random model is made: one of 30 M parameters, or with
`--random 8b` one with the layers of Llama 3.1 8B. Each part is a process of its own.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import Report, Row, median, parser
from gpu_copies import measure_copies
from gpu_engine import Kind, Scale, measure_engine
from gpu_model import SHAPES, make_random_model
from kv_node import node
from vllm_alone import Replay, run
from vllm_alone import Scale as TraceScale

from kvmesh.worker.models.tiny_model import make_tiny_model

PARTS = ("copies", "torch", "kvbm", "retention")
NEED_VLLM = ("kvbm", "retention")
GIB, MIB = 1 << 30, 1 << 20
BASELINE = "baseline, same run"


def copies(report: Report, options: argparse.Namespace) -> str:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    device = torch.device(options.device)
    size, runs = (GIB, 7) if device.type == "cuda" else (8 * MIB, 3)
    worst = measure_copies(report, device, size, runs)
    return f"copies at {worst:.0%} of a plain one or better"


def engine(report: Report, options: argparse.Namespace, kind: Kind) -> str:
    on_gpu = options.device != "cpu"
    is_large = options.model or (on_gpu and options.random != "30m")
    prefix = options.prefix or (8192 if is_large else 4096 if on_gpu else 512)
    scale = Scale(prefix, block=32, rounds=1)
    if on_gpu:
        scale = Scale(prefix, streams=16, window=64, eager=options.eager)
    host_bytes = 16 * GIB if on_gpu else 64 * MIB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or _random_model(folder / "model", options)
        with node(folder, "--host-bytes", str(host_bytes)) as running:
            measuring = measure_engine(report, kind, model, options.device, scale, running)
            return asyncio.run(measuring)


def retention(report: Report, options: argparse.Namespace) -> str:
    on_gpu = options.device != "cpu"
    scale, load = TraceScale(blocks=160), {"agents": 3, "turns": 3, "jobs": 2}
    if on_gpu:
        sizes = {"context": 16384, "system": 4096, "turn": 512, "answer": 64, "job": 8000}
        eager = ("--enforce-eager",) if options.eager else ()
        scale = TraceScale(block=16, blocks=6000, arguments=eager, **sizes)
        load = {"agents": 12, "turns": 8, "jobs": 2}
    trace = argparse.Namespace(seed=0, concurrent=True, **load)
    found: dict[bool, Replay] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or _random_model(folder / "model", options)
        for plugin in (False, True):
            found[plugin] = run(model, folder, plugin, trace, scale)
    off, on = found[False], found[True]
    for title, unit, figure in (
        ("cached share of agents' prompts", "%", _cached),
        ("TTFT of agents, median", "ms", lambda each: 1e3 * median(each.figures.agents)),
        ("TTFT of one-off prompts, median", "ms", lambda each: 1e3 * median(each.figures.others)),
        ("tokens served, prompts included", "1/s", lambda each: each.figures.total / each.seconds),
    ):
        report.add(f"vLLM with retention: {title}", figure(on), unit, f"{figure(off):.4g}")
    return (
        f"retention: {_cached(on):.0f}% of the agents' prompts cached, {_cached(off):.0f}% without"
    )


def _cached(found: Replay) -> float:
    return 100 * found.figures.cached / found.figures.prompt


def _random_model(folder: Path, options: argparse.Namespace) -> Path:
    if options.device == "cpu":
        make_tiny_model(folder)
    else:
        make_random_model(folder, options.random)
    return folder


def measure_part(part: str, options: argparse.Namespace) -> tuple[Report, str]:
    """Measure one part in this process."""
    report = Report(f"{part} on {_named(options.device)}", BASELINE)
    if part == "copies":
        return report, copies(report, options)
    if part == "retention":
        return report, retention(report, options)
    return report, engine(report, options, "vllm" if part == "kvbm" else "torch")


def _named(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"


def _in_child(part: str, options: argparse.Namespace, folder: Path) -> tuple[list[Row], str]:
    """Measure one part in a process of its own, which frees the device's memory at its end."""
    file = folder / f"{part}.json"
    command = [sys.executable, __file__, "--device", options.device, "--parts", part]
    command += ["--json", str(file), "--prefix", str(options.prefix)]
    command += ["--model", str(options.model)] if options.model else []
    command += ["--eager"] if options.eager else []
    if subprocess.run(command, check=False).returncode or not file.exists():
        return [], f"{part} failed"
    content = json.loads(file.read_text())
    return [Row(**row) for row in content["rows"]], content["summary"]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments.add_argument("--device", choices=("cuda", "cpu"), help="a GPU if there is one")
    arguments.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    arguments.add_argument(
        "--random", choices=tuple(SHAPES), default="30m", help="the random model's size on a GPU"
    )
    arguments.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    arguments.add_argument("--parts", default=",".join(PARTS), help="of " + ",".join(PARTS))
    arguments.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens of a prompt")
    options = arguments.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu":
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"unknown parts: {', '.join(sorted(unknown))}")
    if len(parts) == 1:
        if parts[0] in NEED_VLLM and not importlib.util.find_spec("vllm"):
            raise SystemExit(f"{parts[0]} needs vLLM in this environment")
        report, summary = measure_part(parts[0], options)
        report.finish(summary, options.json)
        return
    whole, summaries = Report(f"All parts on {_named(options.device)}", BASELINE), []
    with tempfile.TemporaryDirectory() as folder:
        if options.random != "30m" and options.model is None and options.device != "cpu":
            options.model = _random_model(Path(folder) / "model", options)
        for part in parts:
            if part in NEED_VLLM and not importlib.util.find_spec("vllm"):
                summaries.append(f"{part} skipped (no vLLM)")
                continue
            rows, summary = _in_child(part, options, Path(folder))
            whole.rows += rows
            summaries.append(summary)
    whole.finish("; ".join(summaries), options.json)


if __name__ == "__main__":
    main()
