"""Every row beside NVIDIA Dynamo, both running here and loaded in turns.

Both serve the same model folder with four mock workers of the same step times. A ratio below 1
means that the mesh is ahead. `--dynamo` names a virtual environment with ai-dynamo.
"""

from pathlib import Path

from dynamo_fleet import DynamoSide
from kvmesh_fleet import KvmeshSide
from pairs import Ratio, compare, pair_parser, report

TURNS = ("agent turn of 40K: all", "agent turn of 128K: all")
LONGER = 1.5  # most that a turn of 128K may cost of one of 40K


def verdicts(ratios: list[Ratio]) -> dict[str, str]:
    """The target of each figure, and whether it is met."""
    return {
        each.name: f"≤ {each.target:g}{'' if each.median <= each.target else ', missed'}"
        for each in ratios
        if not each.is_part
    }


def main() -> None:
    arguments = pair_parser(__doc__ or "", rounds=8)
    arguments.add_argument("--dynamo", type=Path, required=True, metavar="VENV")
    arguments.add_argument("--plane", choices=("tcp", "nats"), default="tcp")
    arguments.add_argument(
        "--block-size", type=int, metavar="N", help="tokens per block of both (each one's default)"
    )
    options = arguments.parse_args()
    size = options.block_size
    here = KvmeshSide("kvmesh", None, {"KVMESH_WORKER_BLOCK_SIZE": str(size)} if size else {})
    there = DynamoSide(options.dynamo, options.plane, size)
    ratios = compare(here, there, options)
    report(ratios, here, there, verdicts(ratios), options)
    of = {each.name: each for each in ratios}
    if of.keys() >= {*TURNS}:
        longer = Ratio("", "", of[TURNS[1]].a, of[TURNS[0]].a, LONGER).median
        print(f"a turn of 128K costs {longer:.2f} of one of 40K, target ≤ {LONGER}")
    judged = [each for each in ratios if not each.is_part]
    ahead = sum(each.median <= 1 for each in judged)
    met = sum(each.median <= 0.8 for each in judged)
    print(f"{len(judged)} figures: {ahead} at most 1.0 of Dynamo's, {met} at most 0.8")


if __name__ == "__main__":
    main()
