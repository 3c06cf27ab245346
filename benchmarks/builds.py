"""The rows of this working tree beside those of another checkout, loaded in turns.

Names the figures that moved by more than their noise, and fails if one of them got worse. `--build`
names the other checkout, which has a `.venv`: `make bench BASE=COMMIT` makes one.
"""

import sys
from pathlib import Path

from kvmesh_fleet import KvmeshSide
from pairs import Ratio, compare, pair_parser, report


def verdict(ratio: Ratio) -> str:
    if not ratio.moved:
        return ""
    return "worse" if ratio.median > 1 else "better"


def main() -> int:
    arguments = pair_parser(__doc__ or "", rounds=8)
    arguments.add_argument("--build", type=Path, required=True, metavar="CHECKOUT")
    options = arguments.parse_args()
    here, there = KvmeshSide("this build", None), KvmeshSide("the other", options.build)
    ratios = compare(here, there, options)
    verdicts = {each.name: verdict(each) for each in ratios}
    report(ratios, here, there, verdicts, options)
    worse = [each for each in ratios if verdict(each) == "worse" and not each.is_part]
    for each in worse:
        print(f"worse: {each.name} is {each.median:.2f} of the other build's")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
