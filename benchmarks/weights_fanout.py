"""Time until workers that start together have a model's weights, by topology, in virtual time.

One worker has the weights. Each link has the same rate in each direction. The stream runs the
live code that chooses chunks and sources. From 1,000 targets on, chunks are larger, so that a run
takes minutes; that makes the stream slower, since a worker passes on whole chunks.
"""

from dataclasses import replace

from common import Report, parser

from kvmesh.simulator.report.fanout import compare
from kvmesh.simulator.weights.options import FanoutOptions
from kvmesh.simulator.weights.topologies import least_time

TARGET = 1.25  # times one transfer, for 8 targets
MANY = 1000


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
    given = arguments.parse_args()
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
