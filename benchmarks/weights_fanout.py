"""Time until workers that start together have a model's weights, by topology, in virtual time.

One worker has the weights. Each link has the same rate in each direction. The stream runs the
live code that chooses chunks and sources. From 1,000 targets on, chunks are larger, so that a run
takes minutes; that makes the stream slower, since a worker passes on whole chunks.

With `--real` weights processes of this machine do it too, over links that are limited in both
directions (weights_fanout_real.py), beside the simulation of the same conditions.
"""

import argparse
import asyncio
import sys
from dataclasses import replace

from common import Report, parser

from kvmesh.simulator.report.fanout import compare
from kvmesh.simulator.weights.options import FanoutOptions
from kvmesh.simulator.weights.topologies import least_time

TARGET = 1.25  # times one transfer, for 8 targets
MANY = 1000


def real(given: argparse.Namespace) -> None:
    """Fan-outs of real processes, each beside its simulation."""
    from weights_fanout_real import real_fanout

    count = int(given.targets.split(",")[0])
    options = FanoutOptions(
        targets=count,
        size=int(given.size),
        chunk_bytes=given.chunk,
        link_bytes_per_s=given.link,
        central_bytes_per_s=given.central,
        discovery_s=given.discovery,
    )
    once = options.transfer_s
    report = Report(
        f"Fan-out of {options.size / 1e6:,.0f} MB to {count} processes over links of "
        f"{given.link / 1e6:g} MB/s, {len(options.sizes)} chunks: one transfer takes {once:.1f} s",
        "simulated",
    )
    last: list[float] = []
    middle: list[float] = []
    copies: list[float] = []
    for run in range(given.runs):
        found = asyncio.run(real_fanout(count, options.size, given.chunk, given.link))
        print(run + 1, *(f"{value:.2f}" for value in found), file=sys.stderr, flush=True)
        for runs, value in zip((last, middle), found[:2], strict=True):
            runs.append(value / once)
        copies.append(found[2])
    simulated = compare(options)
    stream = simulated["stream"]
    bound = f"≤ {TARGET}" if count == 8 else ""
    report.add_runs("stream, last", last, "transfers", f"{stream.last / once:.2f}", bound)
    report.add_runs("stream, median", middle, "transfers", f"{stream.median / once:.2f}")
    report.add_runs("sent by the source", copies, "copies", f"{stream.seed_copies:.2f}")
    for name, result in simulated.items():
        if name != "stream":
            report.add(f"{name}, simulated: last", result.last / once, "transfers")
    report.finish(f"last of {count} real targets: {sorted(last)} transfers", given.json)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--targets", default="1,8,64,1000", metavar="N,…")
    arguments.add_argument("--size", type=float, default=1.5e9, metavar="BYTES")
    arguments.add_argument("--chunk", type=int, default=8 << 20, metavar="BYTES")
    arguments.add_argument("--coarse", type=int, default=16 << 20, metavar="BYTES")
    arguments.add_argument("--link", type=float, default=1.25e9, metavar="BYTES/S")
    arguments.add_argument("--central", type=float, default=5e9, metavar="BYTES/S")
    arguments.add_argument("--discovery", type=float, default=0.0, metavar="SECONDS")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--real", action="store_true", help="run weights processes")
    arguments.add_argument("--runs", type=int, default=3, metavar="N", help="of --real")
    given = arguments.parse_args()
    if given.real:
        real(given)
        return
    base = FanoutOptions(
        size=int(given.size),
        chunk_bytes=given.chunk,
        link_bytes_per_s=given.link,
        central_bytes_per_s=given.central,
        discovery_s=given.discovery,
        seed=given.seed,
    )
    title = (
        f"Fan-out of {base.size / 1e9:g} GB over links of {base.link_bytes_per_s / 1e9:g} GB/s, "
        f"{len(base.sizes)} chunks: one transfer takes {base.transfer_s:.2f} s"
    )
    report = Report(title, "least possible")
    told = []
    for count in map(int, given.targets.split(",")):
        options = replace(base, targets=count)
        if count >= MANY:
            options = replace(options, chunk_bytes=given.coarse)
        least = f"{least_time(options) / options.transfer_s:.2f}"
        chunks = f"{count:,} targets, {len(options.sizes)} chunks"
        for name, result in compare(options).items():
            last, middle = result.last / options.transfer_s, result.median / options.transfer_s
            target = f"≤ {TARGET}" if name == "stream" and count == 8 else ""
            report.add(f"{chunks}: {name}, last", last, "transfers", least, target)
            report.add(f"{chunks}: {name}, median", middle, "transfers")
            report.add(f"{chunks}: {name}, sent by the seed", result.seed_copies, "copies", "1")
            if name == "stream":
                told.append(f"{count:,}: {last:.2f}")
    report.finish(f"last target by stream, in transfers: {', '.join(told)}", given.json)


if __name__ == "__main__":
    main()
