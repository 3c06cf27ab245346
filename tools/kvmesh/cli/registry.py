"""All subcommands of `kvmesh`; a command's module is imported only when the command runs.

The module has `configure(parser)`, which adds the command's own arguments, and
`run(arguments, settings) -> int`, which returns the exit status.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
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
        *(("planner", key) for key in ("compose_file", "namespace", "command", "oracle_budget_s")),
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
    "oracle",
    "dashboard",
)


class Implementation(Protocol):
    """Interface of a command's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace, settings: Settings) -> int: ...


@dataclass(frozen=True)
class Command:
    """A subcommand. Options of section `own` become `--key`, of `sections` `--section-key`.

    Options in `excluded` get no flag.
    """

    name: str
    help: str
    module: str
    own: str = ""
    sections: tuple[str, ...] = ()
    excluded: frozenset[OptionKey] = frozenset()

    def load(self) -> Implementation:
        return cast(Implementation, import_module(self.module))


def _service(role: str, help: str, *more: str) -> Command:  # noqa: A002
    return Command(role, help, "kvmesh.cli.commands.service", role, (*more, *SERVICE))


COMMANDS = (
    Command(
        "up",
        "run a whole mesh on this machine",
        "kvmesh.cli.commands.up",
        own="up",
        sections=(*ROLES, *SERVICE),
    ),
    _service("frontend", "run one frontend: HTTP in, tokens out"),
    _service("router", "run one router: chooses a worker for each request"),
    _service("indexer", "run one indexer: tracks the KV blocks that each worker holds"),
    _service(
        "kvbm", "run the block manager of this node: KV blocks in memory and on disk", "transfer"
    ),
    _service(
        "worker", "run one worker: an engine and its publisher", *ENGINES, "transfer", "weights"
    ),
    _service("planner", "run one planner: decides how many workers run, and has it done"),
    Command(
        "oracle",
        "run one oracle: simulates candidate fleets for planners",
        "kvmesh.cli.commands.service",
        own="oracle",
        sections=("router", *SERVICE),
        excluded=NOT_SIMULATED - {("router", "policy")},
    ),
    Command(
        "dashboard",
        "run the dashboard: a web page with the state of the mesh, live",
        "kvmesh.cli.commands.service",
        own="dashboard",
        sections=SERVICE,
    ),
    Command("tail", "show the messages on the bus", "kvmesh.cli.commands.tail", sections=BUS),
    Command(
        "status",
        "show instances, streams and buckets of the mesh",
        "kvmesh.cli.commands.status",
        sections=BUS,
    ),
    Command(
        "top",
        "show workers, sessions and tenants, live",
        "kvmesh.cli.commands.top",
        sections=("nats", "streams", "log"),
    ),
    Command(
        "doctor",
        "check the mesh, and its index against the workers",
        "kvmesh.cli.commands.doctor",
        sections=BUS,
    ),
    Command(
        "streams",
        "show or change the limits of the streams",
        "kvmesh.cli.commands.streams",
        sections=SERVICE,
    ),
    Command(
        "explain",
        "show the routing decisions about a request",
        "kvmesh.cli.commands.explain",
        sections=BUS,
    ),
    Command(
        "usage",
        "add up tokens and GPU time by tenant, key, model or session",
        "kvmesh.cli.commands.usage",
        sections=BUS,
    ),
    Command(
        "trace",
        "show the requests of a session over time",
        "kvmesh.cli.commands.trace",
        sections=BUS,
    ),
    Command(
        "learned",
        "show what each learner gained over its fallback, or when sessions return",
        "kvmesh.cli.commands.learned",
        sections=("nats", "streams", "log"),
    ),
    Command(
        "adapter",
        "load, unload and list LoRA adapters of running workers",
        "kvmesh.cli.commands.adapter",
        sections=("nats", "streams", "log"),
    ),
    Command(
        "fleet",
        "drain workers, put them to sleep, promote them or change their roles",
        "kvmesh.cli.commands.fleet",
        sections=("nats", "streams", "log"),
    ),
    Command(
        "roll",
        "replace the processes of a service one at a time, under load",
        "kvmesh.cli.commands.roll",
        sections=("nats", "streams", "log"),
    ),
    Command(
        "backup",
        "save what only the mesh's store holds, keys, secrets, pins …; check and restore it",
        "kvmesh.cli.commands.backup",
        sections=BUS,
    ),
    Command(
        "keys", "add, list, revoke and rotate API keys", "kvmesh.cli.commands.keys", sections=BUS
    ),
    Command("tool", "report a tool that a session of an agent runs", "kvmesh.cli.commands.tool"),
    Command("replay", "send a trace to a mesh and measure latencies", "kvmesh.cli.commands.replay"),
    Command(
        "workload",
        "read, analyse, synthesise, generate and capture workloads",
        "kvmesh.cli.commands.workload",
    ),
    Command(
        "simulate",
        "run a workload under any policy in virtual time",
        "kvmesh.cli.commands.simulate",
        sections=("router", "mock", "planner", "kvbm"),
        excluded=NOT_SIMULATED,
    ),
    Command(
        "whatif",
        "simulate a live mesh's recent requests under other policies",
        "kvmesh.cli.commands.whatif",
        sections=("router", "mock", "planner", "kvbm", *BUS),
        excluded=NOT_SIMULATED,
    ),
    Command(
        "plan",
        "show the planner's plan and history, change its settings, score its predictors",
        "kvmesh.cli.commands.plan",
    ),
    Command(
        "model",
        "push models to the mesh, pull, list, evict and alias them; parse their output",
        "kvmesh.cli.commands.model",
        sections=("nats", "streams", "weights", "log"),
    ),
    Command(
        "parser",
        "show how a model's raw output parses, or draft a parser for it",
        "kvmesh.cli.commands.parser",
    ),
    Command(
        "config",
        "show the settings in effect, their schema, and the metrics of every process",
        "kvmesh.cli.commands.config",
        sections=(*ROLES, *SERVICE, "up"),
    ),
    Command(
        "completion",
        "print the completion script of a shell, or the manual page",
        "kvmesh.cli.commands.completion",
    ),
    Command(
        "secure",
        "write credentials for every role, and the matching NATS configuration",
        "kvmesh.cli.commands.secure",
        sections=("nats", "streams"),
        excluded=frozenset(
            ("nats", option.key)
            for option in options()
            if option.section == "nats" and option.key != "namespace"
        ),
    ),
)
