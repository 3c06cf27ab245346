"""The prefix index and block hashing, on one pinned core, in CPU seconds of the measuring thread.

Workload: 64 workers of 2,000 blocks; 40 prompt families with 64–256 shared blocks of skewed
popularity, each prompt with 128–384 blocks of its own. Beside each figure stands Dynamo's
`RadixTree`: measured in the same run where `ai-dynamo-runtime` is importable, else as published by
us for version 1.6.1 on a 2-vCPU machine. "Steady" means an index that was filled and emptied
before; the first fill also pays for page faults and growth.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import index_dynamo
from common import Report, parser, percentile
from index_workload import Event, Prompt, interleaved, prompts, trace_requests

from kvmesh.hashing import block_hashes
from kvmesh.index import Buffer, PrefixIndex, create_index

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.reference_index import ReferencePrefixIndex

RUNS = 5
M = 1e6
# Dynamo 1.6.1, used if it is not installed.
PUBLISHED = {
    "store 32": 2.8,
    "remove 32": 3.8,
    "store 1": 0.17,
    "remove 1": 0.17,
    "find 128": 0.097,
    "find 512": 0.047,
}


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this thread for one run of `work`."""
    before = time.thread_time()
    work()
    return time.thread_time() - before


def rates(count: int, work: Callable[[], object], reset: Callable[[], object]) -> list[float]:
    """Millions of `count` per CPU second, for each of `RUNS` runs; `reset` follows each."""
    runs = []
    for _ in range(RUNS):
        runs.append(count / cpu(work) / M)
        reset()
    return runs


def hashing(report: Report) -> None:
    for tokens in (8_192, 131_072):
        for block, published in ((16, "103–110"), (64, "106–114")):
            name = f"hash {tokens // 1024}K tokens, block {block}"
            report.add_runs(name, hash_rates(tokens, block), "M tokens/s", published, "≥ 1,000")


def hash_rates(tokens: int, block: int) -> list[float]:
    buffer = os.urandom(4 * tokens)
    repeats = 2_000_000 // tokens

    def work() -> None:
        for _ in range(repeats):
            block_hashes(buffer, block)

    return rates(tokens * repeats, work, lambda: None)


Stored = tuple[int, int, int | None, bytes, bytes]  # the arguments of `store`
Removed = tuple[int, int, bytes]  # the arguments of `remove`


def stored(events: list[Event]) -> list[Stored]:
    """Store events with separate buffers, in order of arrival, as a network leaves them."""
    return [
        (each.worker, 0, each.parent, bytes(memoryview(each.engine)), bytes(memoryview(each.local)))
        for each in events
    ]


def removed(events: list[Event]) -> list[Removed]:
    """Remove events, newest first and leaves first, as engines evict."""
    return [(each.worker, 0, backwards(each.engine)) for each in reversed(events)]


def store_all(index: PrefixIndex, events: list[Stored]) -> None:
    store = index.store
    for event in events:
        store(*event)


def remove_all(index: PrefixIndex, events: list[Removed]) -> None:
    remove = index.remove
    for event in events:
        remove(*event)


def backwards(hashes: bytes) -> bytes:
    return b"".join(hashes[at - 8 : at] for at in range(len(hashes), 0, -8))


def updates(report: Report, index: PrefixIndex, all_prompts: list[Prompt], size: int) -> None:
    """Store and remove everything in events of `size` blocks."""
    given = interleaved(all_prompts, size)
    count = sum(len(event.engine) // 8 for event in given) if size > 1 else len(given)
    peers = dynamo_updates(given, count)
    events, removals = stored(given), removed(given)
    unit = "M blocks/s" if size > 1 else "M events/s"
    target = "≥ 30" if size > 1 else "≥ 1"
    first = count / cpu(lambda: store_all(index, events)) / M
    remove_all(index, removals)
    stores = rates(count, lambda: store_all(index, events), lambda: remove_all(index, removals))
    store_all(index, events)
    removes = rates(count, lambda: remove_all(index, removals), lambda: store_all(index, events))
    remove_all(index, removals)
    if size > 1:
        report.add(f"store, {size}-block events, first fill", first, unit, peers[0], "")
    report.add_runs(f"store, {size}-block events, steady", stores, unit, peers[0], target)
    report.add_runs(f"remove, {size}-block events", removes, unit, peers[1], target)


def dynamo_updates(events: list[Event], count: int) -> tuple[str, str]:
    size = "32" if count != len(events) else "1"
    runtime = index_dynamo.runtime()
    if runtime is None:
        return f"{PUBLISHED['store ' + size]:.3g}", f"{PUBLISHED['remove ' + size]:.3g}"
    tree = runtime.RadixTree()
    encoded = [
        [(event.worker, index_dynamo.stored(i, event)) for i, event in enumerate(events)],
        [(event.worker, index_dynamo.removed(i, event)) for i, event in enumerate(events[::-1])],
    ]
    apply = tree.apply_event
    store = cpu(lambda: [apply(*call) for call in encoded[0]])
    remove = cpu(lambda: [apply(*call) for call in encoded[1]])
    return f"{count / store / M:.3g}", f"{count / remove / M:.3g}"


def queries(report: Report, index: PrefixIndex, all_prompts: list[Prompt], blocks: int) -> None:
    """Find prompts cut to `blocks` blocks, each held completely by at least one worker."""
    whole = [prompt for prompt in all_prompts if len(prompt.sequence) >= 8 * blocks]
    sequences = [prompt.sequence[: 8 * blocks] for prompt in whole]
    random.Random(1).shuffle(sequences)
    sequences = sequences * (20_000 // len(sequences) + 1)
    matched = sum(len(index.find(s)) // 20 for s in sequences[:1000]) / len(sequences[:1000])
    peer = dynamo_queries(all_prompts, whole, blocks)
    target = {128: ("≥ 0.5", "≥ 1"), 512: ("≥ 0.7", "")}[blocks]
    find = index.find
    single = rates(len(sequences), lambda: [find(each) for each in sequences], lambda: None)
    batches: list[list[Buffer]] = [
        list(sequences[at : at + 64]) for at in range(0, len(sequences), 64)
    ]
    find_batch = index.find_batch
    batched = rates(len(sequences), lambda: [find_batch(each) for each in batches], lambda: None)
    name = f"find, {blocks} blocks, {matched:.0f} workers match"
    report.add_runs(name, single, "M/s", peer, target[0])
    report.add_runs(f"find, {blocks} blocks, batches of 64", batched, "M/s", peer, target[1])


def dynamo_queries(all_prompts: list[Prompt], whole: list[Prompt], blocks: int) -> str:
    runtime = index_dynamo.runtime()
    if runtime is None:
        return f"{PUBLISHED[f'find {blocks}']:.3g}"
    tree = runtime.RadixTree()
    for number, event in enumerate(interleaved(all_prompts, 32)):
        tree.apply_event(event.worker, index_dynamo.stored(number, event))
    asked = [index_dynamo.query(prompt.local, blocks) for prompt in whole[:500]]
    return f"{len(asked) / cpu(lambda: [tree.find_matches(each) for each in asked]) / M:.3g}"


def plain_twin(report: Report, all_prompts: list[Prompt]) -> None:
    """The reference in plain Python, on a sixteenth of the workers."""
    index = ReferencePrefixIndex()
    some = [prompt for prompt in all_prompts if prompt.worker < 4]
    events = stored(interleaved(some, 32))
    blocks = sum(len(event[3]) // 8 for event in events)
    report.add(
        "plain Python: store", blocks / cpu(lambda: store_all(index, events)) / M, "M blocks/s"
    )
    asked = [prompt.sequence[:1024] for prompt in some[:20]]
    spent = cpu(lambda: [index.find(each) for each in asked])
    report.add("plain Python: find, 128 blocks", len(asked) / spent / M, "M/s")


def limit(report: Report) -> None:
    """A bare table in C++: the limit of the memory system. Needs a compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        print("no C++ compiler: skipping the bare table", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "bare_table"
        source = Path(__file__).with_name("bare_table.cpp")
        subprocess.run([compiler, "-O3", "-std=c++20", source, "-o", binary], check=True)
        for keys in (150_000, 10_000_000):
            run = subprocess.run([binary, str(keys)], check=True, capture_output=True, text=True)
            insert, look_up = map(float, run.stdout.split()[:2])
            report.add(f"limit: bare table, {keys:,} keys, insert", 1e3 / insert, "M/s")
            report.add(f"limit: bare table, {keys:,} keys, look up", 1e3 / look_up, "M/s")


def memory(report: Report, entries: int) -> None:
    """Bytes per (worker, block) when workers of 2,000 blocks hold `entries` in all."""
    index = create_index()
    for prompt in prompts(entries // 2_000, 2_000, seed=2):
        index.store(prompt.worker, 0, None, prompt.sequence, prompt.local)
    stats = index.stats()
    name = f"memory at {stats.entries / M:.1f} M entries ({stats.blocks / M:.1f} M blocks)"
    report.add(name, stats.bytes / stats.entries, "bytes/entry", "", "≤ 40")


def scale(report: Report, path: Path, workers: int, duplication: int, split: int) -> str:
    """A trace on many workers: one thread's throughput, then queries beside a saturating writer."""
    requests = list(trace_requests(path, duplication, split))
    rng = random.Random(1)
    placed = [(rng.randrange(workers), local, sequence) for local, sequence in requests]
    index = create_index()

    def serve() -> None:
        for worker, local, sequence in placed:
            index.find(sequence)
            index.store(worker, 0, None, sequence, local)

    spent = cpu(serve)
    blocks = sum(len(local) // 8 for _, local, _ in placed)
    label = f"{workers:,} workers ×{duplication}"
    report.add(f"{label}: block-ops", blocks / spent / M, "M/s/core", "≈ 7 per core")
    report.add(f"{label}: request-ops", 2 * len(placed) / spent / 1e3, "K/s/core", "30 on 24 cores")
    latencies = under_load(index, placed)
    p50, p99 = percentile(latencies, 0.5) * 1e6, percentile(latencies, 0.99) * 1e6
    report.add(f"{label}: find under load, p50", p50, "µs")
    report.add(f"{label}: find under load, p99", p99, "µs", "3,200")
    return f"{label}: find p99 {p99:.0f} µs"


def under_load(index: PrefixIndex, placed: list[tuple[int, bytes, bytes]]) -> list[float]:
    """Wall seconds of queries while another thread clears and refills workers continuously."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for worker, local, sequence in placed:
                index.remove(worker, 0, sequence)
                index.store(worker, 0, None, sequence, local)
                if done.is_set():
                    return

    writer = threading.Thread(target=write)
    writer.start()
    latencies = []
    try:
        for _, _, sequence in random.Random(2).choices(placed, k=20_000):
            before = time.perf_counter()
            index.find(sequence)
            latencies.append(time.perf_counter() - before)
    finally:
        done.set()
        writer.join()
    return latencies


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake JSONL")
    arguments.add_argument("--split", type=int, default=4, help="blocks per 512-token trace block")
    arguments.add_argument(
        "--entries", type=int, default=10_000_000, help="entries of the memory row"
    )
    options = arguments.parse_args()
    sys.setswitchinterval(1e-5)
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(everywhere)})
    report = Report("Prefix index and block hashing", "Dynamo 1.6.1")
    hashing(report)
    all_prompts = list(prompts(64, 2_000))
    index = create_index()
    updates(report, index, all_prompts, 32)
    updates(report, index, all_prompts[:150], 1)
    store_all(index, stored(interleaved(all_prompts, 32)))
    queries(report, index, all_prompts, 128)
    queries(report, index, all_prompts, 512)
    plain_twin(report, all_prompts)
    limit(report)
    memory(report, options.entries)
    os.sched_setaffinity(0, everywhere)
    if options.trace is not None and options.trace.exists():
        for workers, duplication in ((1_000, 1), (7_000, 7), (7_000, 32)):
            scale(report, options.trace, workers, duplication, options.split)
    else:
        print("no --trace FILE: skipping the scale rows", file=sys.stderr)
    figures = {row.name: row.value for row in report.rows}
    report.finish(
        f"store {figures['store, 32-block events, steady']:.3g} M blocks/s, remove "
        f"{figures['remove, 32-block events']:.3g} M blocks/s on one core",
        options.json,
    )


if __name__ == "__main__":
    main()
