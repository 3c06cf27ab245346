"""Time of vLLM's steps under an agent load: its own prefix cache, and the one that retains blocks.

    python benchmarks/vllm_steps.py [--blocks 100000] [--rounds 7]

Needs vLLM; runs on the CPU with a model of 3 MB. Three engines are processes of their own with the
same number of blocks, all cached: one with vLLM's own queue; a retaining one without claims; a
retaining one with every block claimed, those of the load included. In each round, each of them in
turn gets the same load: sessions with a common system prompt, each turn longer than the last, eight
at a time. Prints CPU milliseconds of the engine's thread per step (median over the rounds) and the
ratio to vLLM's own, for whole steps and for scheduling alone. The last column is the share of
vLLM's whole step that scheduling takes more: whole steps compute, and vary by more than this.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = 32
SYSTEM, TURN, ANSWER = 1024, 256, 64
SESSIONS, TURNS = 8, 5
VARIANTS = {
    "vLLM's queue": "own",
    "retaining, none claimed": "none",
    "retaining, all claimed": "all",
}
STEP, SCHEDULING = "step", "scheduling"


class Engine:
    """A vLLM in this process whose scheduler and steps are timed."""

    def __init__(self, model: str, blocks: int, variant: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from kvmesh.worker.enginecore.retention_options import RetentionOptions
        from kvmesh.worker.engines.vllm.retention.settings import retention_transfer_config

        self.claims = variant == "all"
        config = retention_transfer_config(RetentionOptions(budget=1.0))
        arguments = EngineArgs(
            model=model,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            max_model_len=4096,
            max_num_seqs=SESSIONS,
            enforce_eager=True,
            kv_transfer_config=None if variant == "own" else config,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.seconds = {STEP: 0.0, SCHEDULING: 0.0}
        self.steps = 0
        self.rounds = 0
        self._time(self.engine.engine_core.engine_core, "step_fn", STEP)
        self._time(self.scheduler, "schedule", SCHEDULING)
        self._time(self.scheduler, "update_from_output", SCHEDULING)
        self._fill(blocks)

    def _time(self, owner: Any, name: str, into: str) -> None:
        called = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.thread_time()
            try:
                return called(*arguments, **keywords)
            finally:
                self.seconds[into] += time.thread_time() - start

        setattr(owner, name, timed)

    def _fill(self, blocks: int) -> None:
        """Cache blocks of other prompts in the whole pool, 64 to a prompt."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        from kvmesh.retention.claims import RetentionWish

        pool = self.scheduler.kv_cache_manager.block_pool
        retention = self._retention()
        for prompt in range((blocks - 1) // 64):
            held = pool.get_new_blocks(64)
            for number, block in enumerate(held):
                name = (prompt * 64 + number).to_bytes(32, "big")
                pool._insert_block_hash(make_block_hash_with_group_id(name, 0), block, BLOCK)
            if self.claims and retention is not None:
                runs, budget, now = retention._runs, retention._budget, time.monotonic()
                ids = [block.block_id for block in held]
                run = runs.isolate(ids, runs.by_block[ids[0]], "")
                budget.claim(run.retention, len(ids), RetentionWish(60 + prompt % 30), now)
                runs.update(run, ids, now)
            pool.free_blocks(reversed(held))

    def _retention(self) -> Any:
        connector = self.scheduler.connector
        return None if connector is None else connector._retention

    def round(self) -> dict[str, float]:
        """Run the load once; CPU milliseconds per step, and the cached share of the prompts."""
        self.rounds += 1
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.steps = cached = total = 0
        system = [(7 * i + self.rounds) % 8000 for i in range(SYSTEM)]
        prompts = [list(system) for _ in range(SESSIONS)]
        for turn in range(TURNS):
            for session, prompt in enumerate(prompts):
                seed = 1 + session + SESSIONS * turn
                prompt += [(13 * i * seed + self.rounds) % 8000 for i in range(TURN)]
                self._add(f"{self.rounds}-{session}-{turn}", prompt, session)
            while self.engine.has_unfinished_requests():
                self.steps += 1
                for output in self.engine.step():
                    if output.finished:
                        cached += output.num_cached_tokens
                        total += len(output.prompt_token_ids)
                        session = int(output.request_id.split("-")[1])
                        prompts[session] += output.outputs[0].token_ids
        figures = {name: 1e3 * spent / self.steps for name, spent in self.seconds.items()}
        return {**figures, "cached": cached / total, "steps": self.steps}

    def _add(self, name: str, prompt: list[int], session: int) -> None:
        import msgspec
        from vllm import SamplingParams

        from kvmesh.bus.messages import Retain
        from kvmesh.worker.adapters.request_origin import KEY, RequestOrigin

        sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
        if self.scheduler.connector is not None:
            retain = [Retain(0, None, 80, explicit=True)] if self.claims else []
            origin = RequestOrigin(
                request=name,
                salt=1,
                prompt_tokens=len(prompt),
                session=f"s{session}" if self.claims else None,
                retention=retain,
            )
            sampling.extra_args = {"kv_transfer_params": {KEY: msgspec.to_builtins(origin)}}
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)


def serve(model: str, blocks: int, variant: str) -> None:
    """Run a round for every line of standard input; print its figures as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        engine = Engine(model, blocks, variant)
    print("ready", flush=True)
    for _ in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            figures = engine.round()
        print(json.dumps(figures), flush=True)


class Child:
    """A process that runs `serve`."""

    def __init__(self, model: Path, blocks: int, variant: str, log: Path) -> None:
        env = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--serve", variant, "--model", str(model)]
        self.process = subprocess.Popen(
            [*command, "--blocks", str(blocks)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self._log = log
        while (line := self._read()) != "ready":
            if not line:
                raise SystemExit(f"vLLM did not start:\n{log.read_text()[-2000:]}")

    def round(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self._read()
        if not line:
            raise SystemExit(f"vLLM ended:\n{self._log.read_text()[-2000:]}")
        return dict(json.loads(line))

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", choices=VARIANTS.values(), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.blocks, options.serve)
        return
    from kvmesh.worker.models.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model)
        children = {
            name: Child(model, options.blocks, variant, Path(folder) / variant)
            for name, variant in VARIANTS.items()
        }
        for child in children.values():
            child.round()  # warms up
        found: dict[str, list[dict[str, float]]] = {name: [] for name in children}
        for _ in range(options.rounds):
            for name, child in children.items():
                found[name].append(child.round())
        for child in children.values():
            child.process.kill()
    report(options.blocks, found)


def report(blocks: int, found: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of all rounds."""
    base = next(iter(found.values()))
    steps, cached = base[0]["steps"], base[0]["cached"]
    print(f"{blocks} blocks, {steps:.0f} steps a round, {cached:.0%} of the prompts cached")
    print(f"{'CPU ms per step (ratio)':26}{'whole step':>20}{'scheduling':>20}{'more':>9}")
    whole = statistics.median(r[STEP] for r in base)
    for name, rounds in found.items():
        cells = ""
        for column in (STEP, SCHEDULING):
            value = statistics.median(r[column] for r in rounds)
            ratios = [r[column] / b[column] for r, b in zip(rounds, base, strict=True)]
            cells += f"{f'{value:.3f} ({statistics.median(ratios):.3f})':>20}"
        pairs = zip(rounds, base, strict=True)
        more = statistics.median(r[SCHEDULING] - b[SCHEDULING] for r, b in pairs) / whole
        print(f"{name:26}{cells}{more:>9.1%}")


if __name__ == "__main__":
    main()
