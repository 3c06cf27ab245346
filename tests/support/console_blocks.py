"""The console blocks of README and docs, as commands; those that cannot run in a test, with why."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```console[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What a test of a live mesh cannot run: a pattern of commands, and the reason.
CANNOT = {
    r"^kubectl |^for role |^helm |--statefulset": "needs a Kubernetes cluster",
    r"\bdocker ": "needs a Docker daemon; the tests of containers run it",
    r"^(\S+=\S+ )*(claude|codex|pi|qwen|cn|copilot)\b": "needs an agent of npm: `make agents`",
    r"^make |make agents": "is a test itself",
    r"\bpip install|^git clone|-m venv": "installs packages",
    r"/etc/kvmesh|^nats-server|/run/user": "writes to folders of the system",
    r"--engine (vllm|openai)|VLLM_PLUGINS|vllm\.entrypoints": "needs vLLM: `make vllm`",
    r"kvmesh worker …": "is a part of a command",
    r"/nvme|--transfer-host|/models/|Qwen3-": "names disks, hosts or models of a machine",
    r"--connector kubernetes|^fleet\.sh|kvmesh planner --pools gpu|http://ctl|mesh\.example": (
        "needs a cluster"
    ),
    r"benchmarks/": "takes minutes; `make bench` runs some of them",
    r"conversation_trace|kv-cache-tester": "needs a trace that is downloaded",
    r"replay demo|backtest coding|plan size|plan fit|unattended|simulate coding": ("takes minutes"),
    r"simulate teams|--num-requests 50000": "takes minutes",
    r"kvmesh model adapter (load|unload)|kvmesh fleet": (
        "needs several workers of torch or vLLM; tests of these commands run them"
    ),
    r"--tracing-endpoint": "needs a collector",
    r"mesh\.toml|keys\.toml|answers\.jsonl": "needs a file that the reader writes",
    r"--reset-states|--nats-replicas 3|kvmesh planner$": "needs a cluster of NATS servers",
    r"prefetch/pf_|cache/pins/pin_|kvmesh explain pf_": "names a prefetch or pin of the example",
    r"kvmesh doctor --as": "needs the users of `kvmesh secure`",
    r"&$|^export |^set |^cat |^kvmesh (indexer|frontend|router|dashboard)": (
        "runs beside others on a reader's machines; `kvmesh up` runs the same"
    ),
    r"--no-follow --json \|": "needs jq",
}
# Examples of errors.
FAILS = (r"--polcy", r"KVMESH_LOG_LEVEL=loud")


class ConsoleCommand(NamedTuple):
    """A command of a page; `line` is that of its block's first one."""

    page: str
    line: int
    text: str

    @property
    def reason(self) -> str:
        """The reason why a test cannot run it; empty if it can."""
        found = (why for pattern, why in CANNOT.items() if re.search(pattern, self.text))
        return next(found, "")

    @property
    def fails(self) -> bool:
        return any(re.search(pattern, self.text) for pattern in FAILS)

    @property
    def kvmesh(self) -> list[str]:
        """The words of a plain `kvmesh` command, with neither comment nor redirection."""
        words = shlex.split(_joined(self.text), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        plain = words[:1] == ["kvmesh"] and not set(words) & {"|", "&", "…", ">"}
        return words[1:] if plain else []


def console_commands() -> Iterator[ConsoleCommand]:
    """All commands of all pages, in their order."""
    for page in PAGES:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            for command in _commands(block[1]):
                yield ConsoleCommand(page.name, line, command)


def _commands(block: str) -> Iterator[str]:
    """The lines after a prompt, each with the lines that complete it."""
    lines = iter(block.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        command = line[2:]
        while command.endswith("\\") or not _complete(command):
            command += "\n" + next(lines, "'").removeprefix("> ")
        yield command


def _joined(command: str) -> str:
    """The command on one line, where a backslash continues it."""
    return command.replace("\\\n", " ")


def _complete(command: str) -> bool:
    try:
        shlex.split(_joined(command), comments=True)
    except ValueError:
        return False
    return not command.startswith("for ") or command.endswith("done")
