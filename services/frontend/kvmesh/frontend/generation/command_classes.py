"""Class of a shell command: the program that decides how long it takes. Pure.

A class consists of words of this module only, never of words of the command: neither paths nor
secrets nor anything else that a user wrote can appear in it.
"""

import re
from collections.abc import Iterator
from itertools import pairwise, takewhile
from math import ceil, log2
from typing import NamedTuple

MAX_COMMAND = 2048  # characters; the rest is not read
MAX_SLEEP_S = 4096
OTHER = "other"
BACKGROUND = "background"


class CommandClass(NamedTuple):
    """Labels from coarse to fine, and the rank of their usual duration; 0 is instant."""

    labels: tuple[str, ...]
    rank: int


INSTANT, QUICK, UNKNOWN, SLOW, SLOWEST = range(5)
_PROGRAMS = {
    INSTANT: """awk basename cat cd chmod chown cp cut date diff dirname echo env export false file
        grep head hostname id ln ls mkdir mv popd printf ps pushd pwd read realpath rg rm rmdir sed
        set sort source stat tail tee test touch tr tree true uname uniq unset wc which whoami
        xxd""",
    QUICK: """bat curl dig du fd find gh git jq kill lsof nc ping psql redis-cli sqlite3 tar unzip
        wget""",
    SLOW: """ansible aws az black bun clang cmake deno docker eslint ffmpeg flutter g++ gcc gcloud
        go helm java javac jest kubectl mypy next node perl php pip pip3 playwright prettier pyright
        python python3 rsync ruby ruff rustc scp ssh terraform tox tsc uv vite""",
    SLOWEST: """apk apt apt-get bazel brew bundle cargo ctest dnf dotnet gradle gradlew make mvn
        mvnw ninja npm nox pnpm poetry pytest rake rspec rustup swift unittest vitest watch wait
        webpack xcodebuild yarn yum""",
}
RANKS = {name: rank for rank, names in _PROGRAMS.items() for name in names.split()}
_BUILTINS = {".": "source", ":": "true", "[": "test", "[[": "test"}
# they prepare or report what another command does, whose class counts
_SETUP = frozenset(
    (
        *("cd", "echo", "export", "false", "popd", "printf", "pushd", "set", "source", "test"),
        *("true", "unset"),
    )
)
# words of the shell without a class of their own
_KEYWORDS = frozenset(
    (
        *("case", "done", "esac", "fi", "for", "function", "in", "select", "}"),
        *("alias", "break", "continue", "declare", "exit", "hash", "let", "local", "readonly"),
        *("return", "shift", "shopt", "trap", "type", "typeset", "ulimit", "umask", "unalias"),
    )
)
_SCRIPT_RUNNERS = ("npm", "pnpm", "yarn", "bun")  # "npm run test" is "npm test"
_SCRIPTS = "add audit build check ci dev exec format install lint run start test typecheck update"
_SUBCOMMANDS = {
    "git": "add apply bisect blame branch checkout cherry-pick clean clone commit diff fetch grep"
    " init log merge mv pull push rebase remote reset restore revert rm show stash status submodule"
    " switch tag worktree",
    **dict.fromkeys(_SCRIPT_RUNNERS, _SCRIPTS),
    "cargo": "add bench build check clean clippy doc fetch fmt install run test update",
    "go": "build env fmt generate get install list mod run test vet",
    "docker": "build compose exec images inspect logs ps pull push restart rm run start stop",
    "kubectl": "apply delete describe exec get logs rollout wait",
    "make": "all build check clean format install lint test",
    **dict.fromkeys(("pip", "pip3"), "download freeze install list show uninstall wheel"),
    "uv": "add lock pip sync venv",
    "poetry": "add build install lock update",
    "gh": "api issue pr release repo run workflow",
    "terraform": "apply destroy fmt init plan validate",
    "dotnet": "build publish restore run test",
    **dict.fromkeys(("mvn", "mvnw"), "clean compile install package test verify"),
    **dict.fromkeys(("gradle", "gradlew"), "assemble build check clean test"),
    **dict.fromkeys(("apt", "apt-get", "brew"), "install list remove search update upgrade"),
    "swift": "build run test",
    "bazel": "build run test",
}
SUBCOMMANDS = {name: frozenset(words.split()) for name, words in _SUBCOMMANDS.items()}
# programs and words before the program that does the work; flags and numbers after them count as
# theirs
_WRAPPERS = frozenset(
    (
        *("command", "env", "exec", "nice", "nohup", "npx", "pnpx", "sudo", "time", "timeout"),
        *("bunx", "uvx", "xargs", "stdbuf", "do", "then", "else", "if", "until", "while", "!", "{"),
    )
)
_RUNNERS = {("uv", "run"), ("poetry", "run"), ("pnpm", "exec"), ("npm", "exec"), ("bundle", "exec")}
_SHELLS = frozenset(("bash", "dash", "sh", "zsh"))
_TOKENS = re.compile(
    r"""(?P<end>&&|\|\||\d?>&\d?|&>>?|[;|&\n()])|(?P<word>(?:'[^']*'?|"(?:\\.|[^"\\])*"?|\\.|[^\s;|&()'"\\])+)"""
)
_QUOTES = re.compile(r"""['"\\]""")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FLAG = re.compile(r"-|\d")
_DOCUMENT = re.compile(r"<<-?\s*['\"]?(\w+)")
_SLEEP = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_DEPTH = 3  # of shells within shells


def command_class(command: str) -> CommandClass:
    """The class of the slowest program of a command line, the first of equally slow ones.

    A builtin such as `cd` or `echo` counts only if no other command stands beside it.
    Labels are the program, or `other`, with a known subcommand ("npm test"); of a sleep also its
    duration, rounded up to a power of two ("sleep", "64s"). A command that only starts
    programs in the background is `background`.
    """
    found = list(_classes(command[:MAX_COMMAND], 0))
    return max(found, key=_weight, default=CommandClass((OTHER,), UNKNOWN))


def _weight(found: CommandClass) -> tuple[bool, bool, int]:
    name = found.labels[0]
    return name not in _SETUP, name != BACKGROUND, found.rank


def _classes(command: str, depth: int) -> Iterator[CommandClass]:
    for words, background in _simple_commands(command):
        if background:
            yield CommandClass((BACKGROUND,), INSTANT)
        else:
            yield from _class_of(words, depth)


def _simple_commands(command: str) -> Iterator[tuple[list[str], bool]]:
    """The words of each simple command without quotes, and whether it runs in the background."""
    words: list[str] = []
    for token in _TOKENS.finditer(_without_documents(command)):
        word, end = token["word"], token["end"]
        if word is not None:
            words.append(word[1:-1] if " " in word and word[0] in "'\"" else _QUOTES.sub("", word))
        elif ">" not in end:
            if words:
                yield words, end == "&"
            words = []
    if words:
        yield words, False


def _without_documents(command: str) -> str:
    """The command without the bodies of its here-documents and without comments."""
    kept: list[str] = []
    delimiter = ""
    for line in command.replace("\\\n", " ").split("\n"):
        if delimiter:
            delimiter = "" if line.strip() == delimiter else delimiter
            continue
        if line.lstrip().startswith("#"):
            continue
        found = _DOCUMENT.search(line)
        delimiter = found[1] if found is not None else ""
        kept.append(_DOCUMENT.sub("", line))
    return "\n".join(kept)


def _class_of(words: list[str], depth: int) -> Iterator[CommandClass]:
    words = _unwrapped(words)
    if not words or words[0] in _KEYWORDS:
        return
    program = words[0].rpartition("/")[2]
    program = _BUILTINS.get(program, program)
    if program == "sleep":
        yield _sleep(words[1:])
    elif program in _SHELLS:
        script = _script(words)
        if script is None or depth == _MAX_DEPTH:
            yield CommandClass((OTHER,), UNKNOWN)
        else:
            yield from _classes(script, depth + 1)
    else:
        yield _known(program, words[1:])


def _unwrapped(words: list[str]) -> list[str]:
    """The words from the program on that does the work."""
    while words:
        program = words[0].rpartition("/")[2]
        if _ASSIGNMENT.match(program):
            words = words[1:]
        elif program in _WRAPPERS:
            words = _after_flags(words[1:])
        elif (program, *words[1:2]) in _RUNNERS:
            words = _after_flags(words[2:])
        elif program in ("python", "python3") and words[1:2] == ["-m"]:
            return words[2:] if words[2:] and words[2] in RANKS else words
        else:
            return words
    return words


def _after_flags(words: list[str]) -> list[str]:
    own = (bool(_FLAG.match(word)) for word in words)
    return words[sum(takewhile(bool, own)) :]


def _script(words: list[str]) -> str | None:
    """The script of `bash -c SCRIPT`, also as `-lc`; None of a script file."""
    for flag, script in pairwise(words):
        if flag.startswith("-") and flag.endswith("c"):
            return script
    return None


def _known(program: str, arguments: list[str]) -> CommandClass:
    rank = RANKS.get(program)
    if rank is None:
        return CommandClass((OTHER,), UNKNOWN)
    known = SUBCOMMANDS.get(program)
    if known is None:
        return CommandClass((program,), rank)
    named = [word for word in arguments if word in known]
    if not named:
        return CommandClass((program,), rank)
    script = named[0] == "run" and program in _SCRIPT_RUNNERS and len(named) > 1
    return CommandClass((f"{program} {named[1 if script else 0]}",), rank)


def _sleep(arguments: list[str]) -> CommandClass:
    total = 0.0
    for argument in arguments:
        found = _SLEEP.fullmatch(argument)
        if found is not None:
            total += float(found[1]) * _UNITS[found[2]]
    if not total:
        return CommandClass(("sleep",), SLOWEST + 1)
    bounded = min(max(total, 1.0), MAX_SLEEP_S)
    return CommandClass(("sleep", f"{2 ** ceil(log2(bounded))}s"), SLOWEST + 1)
