"""`kvmesh plan profiles`: the shipped step profiles, with their sources."""

import argparse
from functools import partial

import numpy as np

from kvmesh.cli.arguments import failed
from kvmesh.settings import Settings
from kvmesh.step_times.profile import StepProfileError
from kvmesh.step_times.registry import load_roofline, load_step_profile, shipped_profiles
from kvmesh.step_times.roofline import Roofline
from kvmesh.terminal.console import print_line, stdout_console
from kvmesh.terminal.tables import FittedTable, columns

HELP = "list the shipped step profiles of GPUs and models"
BATCH, CONTEXT = 32, 4096


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvmesh plan profiles [NAME]"
    parser.add_argument(
        "profile", nargs="?", metavar="NAME", help="a shipped name or a TOML file, for its sources"
    )


def run(arguments: argparse.Namespace, _settings: Settings) -> int:
    if arguments.profile is None:
        _list()
        return 0
    try:
        file = shipped_profiles().get(arguments.profile, arguments.profile)
        load_step_profile(file)
        _show(load_roofline(file))
    except StepProfileError as error:
        return failed("plan profiles", error, 2)
    return 0


def _list() -> None:
    figures = ("prefill tok/s", f"decode ms, 1×{CONTEXT}", f"{BATCH}×{CONTEXT}", "KV tokens")
    table = FittedTable(columns("profile", *figures, numbers=figures), split=True)
    for name, file in shipped_profiles().items():
        profile = load_step_profile(file)
        limits = profile.limits
        assert limits is not None
        tokens = limits.max_batched_tokens
        table.add_row(
            name, f"{tokens / profile.prefill(tokens):,.0f}",
            f"{1000 * profile.decode_seconds(1, CONTEXT):.1f}",
            f"{1000 * profile.decode_seconds(BATCH, BATCH * CONTEXT):.1f}",
            f"{limits.kv_tokens:,}",
        )  # fmt: skip
    console = stdout_console()
    table.show(console)
    print_line(
        console,
        "rooflines of published figures, not measurements; `kvmesh plan profiles NAME` has their"
        " sources",
    )


def _show(roofline: Roofline) -> None:
    line = partial(print_line, stdout_console())
    line(roofline.description)
    assumed = roofline.assumed
    line(
        f"assumed: {assumed.compute_share:.0%} of the peak operations,"
        f" {assumed.bandwidth_share:.0%} of the bandwidth, {assumed.step_overhead_ms:g} ms per step"
    )
    for source in roofline.sources:
        line(f"source: {source.title}, {source.url}: {source.figures}")
    for each in roofline.compared:
        sequences, tokens = np.array(float(each.sequences)), np.array(float(each.tokens))
        modelled = (
            roofline.decode_s(sequences, tokens) if each.sequences else roofline.prefill_s(tokens)
        )
        line(
            f"compared: {1000 * float(modelled):.1f} ms, measured {each.measured_ms:g} ms"
            f" ({each.note}; {each.url})"
        )
