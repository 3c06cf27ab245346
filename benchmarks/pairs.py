"""Two systems in turns: the ratio of each pair of runs, and whether it is beyond its noise.

Both systems serve at the same time and are loaded in turns; the order is reversed each round. Their
starts, idle use and memory are measured one after the other, alone.
"""

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from common import median, parser
from rows import FAST_MS, ROWS, STEP_MS, Fleet, Load, Row, Sample, Side, TokenError, chosen, warm

CERTAINTY = 0.98
LEAST = 0.02  # of a change that counts


@dataclass(frozen=True)
class Ratio:
    """One figure of both systems, round by round; a name that is indented is a part of another."""

    name: str
    unit: str
    a: list[float]
    b: list[float]
    target: float

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.a, self.b, strict=True))

    @property
    def median(self) -> float:
        return median(self.ratios)

    @property
    def range(self) -> tuple[float, float]:
        """The interval that holds the true median with certainty 0.98, by the order of the ratios.

        With less than seven rounds it is all that was seen, and less certain.
        """
        left = outside(len(self.a))
        return self.ratios[left], self.ratios[-1 - left]

    @property
    def moved(self) -> bool:
        """True if the change is beyond the noise of the rounds, and enough of them are known."""
        low, high = self.range
        certain = 0.5 ** (len(self.a) - 1) <= 1 - CERTAINTY
        return certain and abs(self.median - 1) > LEAST and not low <= 1 <= high

    @property
    def is_part(self) -> bool:
        return self.name.startswith(" ")


def outside(rounds: int) -> int:
    """Number of ratios on either side that lie outside the interval of the median."""
    left, chance = 0, 0.5**rounds
    while left + 1 < rounds / 2:
        chance += math.comb(rounds, left + 1) * 0.5**rounds
        if 2 * chance > 1 - CERTAINTY:
            break
        left += 1
    return left


def compare(a: Side, b: Side, options: argparse.Namespace) -> list[Ratio]:
    """Measure all rows on both sides. Raises RuntimeError, LoadError, TokenError."""
    found: list[Ratio] = []
    for kind, step_ms in (("started", 0.0), ("fast", FAST_MS), ("paced", STEP_MS)):
        if not (rows := [row for row in options.rows if row.fleet == kind]):
            continue
        samples: dict[str, list[tuple[Sample, Sample]]] = {row.name: [] for row in rows}
        with ExitStack() as stack:
            fleets: dict[str, Fleet] = {}
            for side in (a, b):
                if kind == "started":  # the first start compiles modules and fills the page cache
                    with side.started():
                        continue
                fleet = fleets[side.name] = stack.enter_context(side.running(step_ms))
                warm(Load(fleet, 0, options.scale))
            for number, row in itertools.product(range(1, options.rounds + 1), rows):
                order = (a, b) if number % 2 else (b, a)
                seed = number * len(ROWS) + ROWS.index(row)
                taken = _pair(row, order, fleets, seed, options.scale)
                samples[row.name].append((taken[a.name], taken[b.name]))
                print(f"{row.name}: round {number} of {options.rounds}", flush=True)
        for row in rows:
            found += _ratios(row, samples[row.name])
    return found


def _pair(
    row: Row, order: tuple[Side, Side], fleets: Mapping[str, Fleet], seed: int, scale: float
) -> dict[str, Sample]:
    """The row on one side after the other, on a fleet of its own where none runs.

    Raises TokenError unless both have counted as many tokens in the same prompts.
    """
    taken: dict[str, Sample] = {}
    for side in order:
        with ExitStack() as stack:
            fleet = fleets.get(side.name) or stack.enter_context(side.started())
            taken[side.name] = row.measure(Load(fleet, seed, scale))
    tokens = {name: sample.prompt_tokens for name, sample in taken.items()}
    if len({*tokens.values()}) > 1:
        raise TokenError(f"{row.name}: the prompts have {tokens} tokens")
    return taken


def _ratios(row: Row, samples: list[tuple[Sample, Sample]]) -> list[Ratio]:
    first_a, first_b = samples[0]
    return [
        Ratio(
            f"  {row.name}: {name.strip()}" if name.startswith(" ") else f"{row.name}: {name}",
            unit,
            [a.figures[name].value for a, _ in samples],
            [b.figures[name].value for _, b in samples],
            row.targets.get(name, 1.0),
        )
        for name, (_, unit) in first_a.figures.items()
        if name in first_b.figures
    ]


def table(ratios: list[Ratio], a: Side, b: Side, verdicts: dict[str, str]) -> str:
    """Markdown: medians, the median ratio, its range, and a verdict for each figure."""
    lines: list[tuple[str, ...]] = [("figure", a.name, b.name, "ratio", "range", "")]
    for each in ratios:
        low, high = each.range
        name = each.name.replace("  ", "&emsp;") + f", {each.unit}"
        values = f"{median(each.a):.3g}", f"{median(each.b):.3g}", f"{each.median:.2f}"
        lines.append((name, *values, f"{low:.2f}–{high:.2f}", verdicts.get(each.name, "")))
    return _aligned(lines, left=(0, 5))


def short_table(ratios: list[Ratio], a: Side, b: Side) -> str:
    """Markdown for a page: a line for the figures of a row in one unit; bold where `b` is ahead."""
    groups: dict[tuple[str, str], list[Ratio]] = {}
    for each in ratios:
        if not each.is_part:
            groups.setdefault((each.name.partition(":")[0], each.unit), []).append(each)
    lines: list[tuple[str, ...]] = [("figure", a.name, b.name, "ratio")]
    for (row, unit), figures in groups.items():
        names = " / ".join(each.name.partition(": ")[2] for each in figures)
        sides = (
            " / ".join(f"{median(each):.3g}" for each in values)
            for values in ([each.a for each in figures], [each.b for each in figures])
        )
        rounded = [f"{each.median:.2f}" for each in figures]
        marked = (f"**{each}**" if float(each) > 1 else each for each in rounded)
        lines.append((f"{row}: {names}, {unit}", *sides, " / ".join(marked)))
    return _aligned(lines, left=(0,))


def _aligned(lines: Sequence[tuple[str, ...]], left: tuple[int, ...]) -> str:
    """Lines as a table in Markdown; the first one is its head, `left` has the columns of text."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [
        "-" * width if at in left else "-" * (width - 1) + ":" for at, width in enumerate(widths)
    ]
    padded = [
        [f"{cell:{'<' if at in left else '>'}{widths[at]}}" for at, cell in enumerate(line)]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def report(
    ratios: list[Ratio], a: Side, b: Side, verdicts: dict[str, str], options: argparse.Namespace
) -> None:
    """Print the table, and write all figures as JSON if a file is named."""
    print(short_table(ratios, a, b) if options.short else table(ratios, a, b, verdicts))
    if options.json is not None:
        content = [
            {**asdict(r), "ratio": r.median, "range": r.range, "moved": r.moved} for r in ratios
        ]
        options.json.write_text(json.dumps(content, indent=2) + "\n")


def pair_parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options of a script that compares two systems; `rows` gives those to measure."""
    arguments = parser(description)
    arguments.add_argument("--rounds", type=int, default=rounds, metavar="N")
    arguments.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    arguments.add_argument(
        "--only", type=chosen, default="", metavar="ROW,…", dest="rows", help="names' beginnings"
    )
    arguments.add_argument("--short", action="store_true", help="print the table of the README")
    return arguments
