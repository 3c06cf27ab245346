"""All subcommands of `kvmesh`; a command's module is imported only when the command runs.

The module has `configure(parser)`, which adds the command's own arguments, and
`run(arguments, settings) -> int`, which returns the exit status.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Protocol, cast

from kvmesh.settings import OptionKey, Settings, options

BUS = ("nats", "log")
SERVICE = ("nats", "streams", "log", "process", "tracing")
ENGINES = ("mock", "torch", "vllm", "remote", "sglang", "trtllm")
# Options without effect in the simulator, and the policy, which has its own flag there.
NOT_SIMULATED: frozenset[OptionKey] = frozenset(
    [
        *(("router", key) for key in ("policy", "name", "index_timeout_s")),
        ("router", "metrics_port"),
        *(("mock", key) for key in ("dp_ranks", "startup_s", "tick_s", "seed", "script")),
        ("mock", "prepare_s"),
        *(("mock", key) for key in ("output_tokens", "reasoning_tokens")),
        *(("mock", key) for key in ("think_open", "think_close")),
        *(("mock", key) for key in ("crash_step", "hang_step", "slow_step", "slow_factor")),
        *(("mock", key) for key in ("lose_every", "kvbm")),
        *(("kvbm", key) for key in ("name", "node", "directory", "key", "remote_group")),
        *(("kvbm", key) for key in ("disk_free_bytes", "remote_timeout_s")),
        ("kvbm", "metrics_port"),
        *(("planner", key) for key in ("name", "connector", "metrics_port")),
        *(("planner", key) for key in ("compose_file", "namespace", "command")),
        *(("planner", key) for key in ("connector_timeout_s", "manual_hold_s")),
    ]
)
ROLES = (
    "frontend",
    "router",
    "indexer",
    "kvbm",
    "worker",
    *ENGINES,
    "transfer",
    "weights",
    "planner",
    "dashboard",
)


class Implementation(Protocol):
    """Interface of a command's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace, settings: Settings) -> int: ...


@dataclass(frozen=True)
class Command:
    """A subcommand. Options of section `own` become `--key`, of `sections` `--section-key`.

    Options in `excluded` get no flag. A `name` of two words is an action of the command that the
    first one names, with options of its own.
    """

    name: str
    help: str
    module: str
    own: str = ""
    sections: tuple[str, ...] = ()
    excluded: frozenset[OptionKey] = frozenset()

    @property
    def is_noun(self) -> bool:
        """True if it is no action of another command."""
        return " " not in self.name

    def load(self) -> Implementation:
        return cast(Implementation, import_module(self.module))


def _service(role: str, help: str, *more: str) -> Command:  # noqa: A002
    return Command(role, help, "kvmesh.cli.commands.run.service", role, (*more, *SERVICE))


GROUPS = {
    "run": (
        Command(
            "up",
            "run a whole mesh on this machine",
            "kvmesh.cli.commands.run.up",
            own="up",
            sections=(*ROLES, *SERVICE),
        ),
        _service("frontend", "run one frontend: HTTP in, tokens out"),
        _service("router", "run one router: chooses a worker for each request"),
        _service("indexer", "run one indexer: tracks the KV blocks that each worker holds"),
        _service(
            "kvbm",
            "run the block manager of this node: KV blocks in memory and on disk",
            "transfer",
        ),
        _service(
            "worker", "run one worker: an engine and its publisher", *ENGINES, "transfer", "weights"
        ),
        _service("planner", "run one planner: decides how many workers run, and has it done"),
        Command(
            "dashboard",
            "run the dashboard: a web page with the state of the mesh, live",
            "kvmesh.cli.commands.run.service",
            own="dashboard",
            sections=SERVICE,
        ),
    ),
    "look": (
        Command(
            "status",
            "show instances, streams and buckets of the mesh",
            "kvmesh.cli.commands.look.status",
            sections=BUS,
        ),
        Command(
            "top",
            "show workers, sessions and tenants, live",
            "kvmesh.cli.commands.look.top",
            sections=("nats", "streams", "log"),
        ),
        Command(
            "doctor",
            "check the mesh, and its index against the workers",
            "kvmesh.cli.commands.look.doctor",
            sections=BUS,
        ),
        Command(
            "explain",
            "show the decisions about a request, or the requests of a session",
            "kvmesh.cli.commands.look.explain",
            sections=BUS,
        ),
        Command(
            "explain trace",
            "show the requests of a session over time",
            "kvmesh.cli.commands.look.trace",
            sections=BUS,
        ),
        Command(
            "usage",
            "add up tokens and GPU time by tenant, key, model or session",
            "kvmesh.cli.commands.look.usage",
            sections=BUS,
        ),
        Command(
            "tail", "show the messages on the bus", "kvmesh.cli.commands.look.tail", sections=BUS
        ),
        Command(
            "plan",
            "show the planner's plan and history, change its settings, score its predictors",
            "kvmesh.cli.commands.look.plan",
        ),
        Command(
            "plan learned",
            "show what each learner gained over its fallback, or when sessions return",
            "kvmesh.cli.commands.look.learned",
            sections=("nats", "streams", "log"),
        ),
    ),
    "operate": (
        Command(
            "fleet",
            "drain, promote and roll workers, put them to sleep or change their roles",
            "kvmesh.cli.commands.operate.fleet",
            sections=("nats", "streams", "log"),
        ),
        Command(
            "fleet roll",
            "replace the processes of a service one at a time, under load",
            "kvmesh.cli.commands.operate.roll",
            sections=("nats", "streams", "log"),
        ),
        Command(
            "config",
            "show the settings in effect, their schema, and the metrics of every process",
            "kvmesh.cli.commands.operate.config",
            sections=(*ROLES, *SERVICE, "up"),
        ),
        Command(
            "config completion",
            "print the completion script of a shell, or the manual page",
            "kvmesh.cli.commands.operate.completion",
        ),
        Command(
            "config streams",
            "show or change the limits of the streams",
            "kvmesh.cli.commands.operate.streams",
            sections=SERVICE,
        ),
        Command(
            "backup",
            "save what only the mesh's store holds, keys, secrets, pins …; check and restore it",
            "kvmesh.cli.commands.operate.backup",
            sections=BUS,
        ),
        Command(
            "keys",
            "add, list, revoke and rotate API keys",
            "kvmesh.cli.commands.operate.keys",
            sections=BUS,
        ),
        Command(
            "secure",
            "write credentials for every role, and the matching NATS configuration",
            "kvmesh.cli.commands.operate.secure",
            sections=("nats", "streams"),
            excluded=frozenset(
                ("nats", option.key)
                for option in options()
                if option.section == "nats" and option.key != "namespace"
            ),
        ),
    ),
    "models": (
        Command(
            "model",
            "push models to the mesh, pull, list, evict and alias them; parse their output",
            "kvmesh.cli.commands.models.model",
            sections=("nats", "streams", "weights", "log"),
        ),
        Command(
            "model adapter",
            "load, unload and list LoRA adapters of running workers",
            "kvmesh.cli.commands.models.adapter",
            sections=("nats", "streams", "log"),
        ),
        Command(
            "model parser",
            "show how a model's raw output parses, or draft a parser for it",
            "kvmesh.cli.commands.models.parser",
        ),
    ),
    "workloads": (
        Command(
            "workload",
            "read, analyse, synthesise, generate and capture workloads",
            "kvmesh.cli.commands.workloads.workload",
        ),
        Command(
            "replay",
            "send a trace to a mesh and measure latencies",
            "kvmesh.cli.commands.workloads.replay",
        ),
        Command(
            "simulate",
            "run a workload, or a live mesh's requests, under any policy in virtual time",
            "kvmesh.cli.commands.workloads.simulate",
            sections=("router", "mock", "planner", "kvbm"),
            excluded=NOT_SIMULATED,
        ),
        Command(
            "simulate live",
            "simulate a live mesh's recent requests under other policies",
            "kvmesh.cli.commands.workloads.live",
            sections=("router", "mock", "planner", "kvbm", *BUS),
            excluded=NOT_SIMULATED,
        ),
        Command(
            "tool",
            "report a tool that a session of an agent runs",
            "kvmesh.cli.commands.workloads.tool",
        ),
    ),
}
COMMANDS = tuple(chain.from_iterable(GROUPS.values()))
