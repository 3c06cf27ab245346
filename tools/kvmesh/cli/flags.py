"""Command-line flags generated from the settings schema."""

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_origin

from kvmesh.cli.references.foreign_flags import foreign_flag
from kvmesh.settings import CONFIG, Flag, Option, OptionKey, options

ALIASES = {
    ("nats", "url"): "--nats",
    ("worker", "engine"): "--engine",
    ("worker", "model"): "--model",
    ("frontend", "port"): "--port",
    ("router", "policy"): "--policy",
}
ALL = "all"
TUNING = "tuning"
STATE_DIR = ("up", "state_dir")
MESH_FLAG = "--state-dir"
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: "BOOL"}


class FlagParser(argparse.ArgumentParser):
    """Reports errors in one line, with the nearest known flag.

    `--help` names the sections of settings, and shows only those of their options that have a short
    name; `--help SECTION` shows the others. Options that few meshes change are a section of their
    own, TUNING.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self._folded: dict[str, list[argparse.Action]] = {}
        self._help = self.add_argument(
            "-h", "--help", action=_Help, nargs=0, default=argparse.SUPPRESS, help="show this help"
        )

    def fold(self, sections: dict[str, list[argparse.Action]]) -> None:
        """Leave the options of these sections out of the short help."""
        self._folded = sections
        if sections:
            self._help.nargs, self._help.metavar = "?", "SECTION"
            self._help.help = f"show this help, the options of a section, or {ALL} options"

    def help_about(self, section: str) -> str:
        """The short help if `section` is empty, all help, or a section's; hides other options."""
        if section not in ("", ALL, *self._folded):
            known = ", ".join([*self._folded, ALL])
            self.error(f"argument --help: no section {section} (sections: {known})")
        if section in self._folded:
            self.description = self.epilog = None
        for action in self._actions:
            if not self._is_shown(action, section):
                action.help = argparse.SUPPRESS
        text = self.format_help()
        if section or not self._folded:
            return text
        more = f"sections of further options (`{self.prog} --help SECTION`, or `{ALL}`)"
        width = max(shutil.get_terminal_size().columns - 2, 11)  # as argparse does
        return f"{text}\n{textwrap.fill(f'{more}: ' + ', '.join(self._folded), width)}\n"

    def _is_shown(self, action: argparse.Action, section: str) -> bool:
        if section in self._folded:
            return action in self._folded[section]
        short = any(name in ALIASES.values() for name in action.option_strings)
        return short or section == ALL or not any(action in each for each in self._folded.values())

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            message = f"unknown flag {unknown[1]}{hint(unknown[1], known)}"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Help(argparse.Action):
    """Prints the help and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.help_about(values if isinstance(values, str) else ""), end="")
        parser.exit()


class _Record(argparse.Action):
    """Stores a flag as the user wrote it, for error messages."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        section, _, key = self.dest.partition(".")
        text = values if isinstance(values, str) else str(self.const)
        settings_flags(namespace)[section, key] = Flag(option_string or self.dest, text)


class _Extend(_Record):
    """A list's flag; repeated flags are concatenated."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        section, _, key = self.dest.partition(".")
        before = settings_flags(namespace).get((section, key))
        joined = f"{before.text},{values}" if before is not None else values
        super().__call__(parser, namespace, joined, option_string)


def settings_flags(namespace: argparse.Namespace) -> dict[OptionKey, Flag]:
    """The settings flags on a command line, by section and key."""
    flags: dict[OptionKey, Flag] = vars(namespace).setdefault("settings_flags", {})
    return flags


def add_flags(
    parser: argparse.ArgumentParser,
    own: str,
    sections: Iterable[str],
    excluded: Container[OptionKey] = (),
) -> None:
    """Add --config and a flag per option: `--key` for section `own`, `--section-key` for others.

    Options in `excluded` get no flag. The short help leaves out the sections other than `own`. What
    connects to NATS may name the mesh of a `kvmesh up` by its state directory.
    """
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"settings as a TOML file [{CONFIG}]"
    )
    groups = {name: parser.add_argument_group(name) for name in (own, *sections) if name}
    if "nats" in groups and "up" not in groups and ("nats", "url") not in excluded:
        state = next(o for o in options() if (o.section, o.key) == STATE_DIR)
        help_text = f"state directory of the `kvmesh up` that runs NATS [{state.env}]"
        parser.add_argument(
            MESH_FLAG, metavar="PATH", help=help_text, action=_Record,
            dest=".".join(STATE_DIR), default=argparse.SUPPRESS,
        )  # fmt: skip
    folded: dict[str, list[argparse.Action]] = {name: [] for name in groups if name != own}
    tuning: list[argparse.Action] = []
    for option in options():
        if option.section in groups and (option.section, option.key) not in excluded:
            added = _add(groups[option.section], option, _names(option, own))
            if option.tuning:
                tuning.append(added)
            elif option.section != own:
                folded[option.section].append(added)
    if tuning:
        folded[TUNING] = tuning
    if isinstance(parser, FlagParser):
        parser.fold(folded)


def _names(option: Option, own: str) -> list[str]:
    key = (option.file_key if option.secret else option.key).replace("_", "-")
    if option.section == own:
        return [f"--{key}"]
    alias = ALIASES.get((option.section, option.key))
    full = f"--{option.section}-{key}"
    return [alias, full] if alias and (own == "up" or option.section == "nats") else [full]


def _add(group: argparse._ArgumentGroup, option: Option, names: list[str]) -> argparse.Action:
    dest = f"{option.section}.{option.file_key if option.secret else option.key}"
    help_text = describe(option).replace("%", "%%")
    action = _Extend if get_origin(option.type) is list else _Record
    kind: dict[str, Any] = {"action": action, "dest": dest, "default": argparse.SUPPRESS}
    if option.type is not bool:
        return group.add_argument(*names, metavar=metavar(option), help=help_text, **kind)
    opposite = [f"--no-{name.removeprefix('--')}" for name in names]
    shown = group.add_argument(*names, nargs=0, const="true", help=help_text, **kind)
    group.add_argument(*opposite, nargs=0, const="false", help=argparse.SUPPRESS, **kind)
    return shown


def describe(option: Option) -> str:
    """The description, the default and the environment variable of an option."""
    if option.secret:
        return f"file with the secret: {option.description} [{option.file_env} or {option.env}]"
    default = one_line(option.default)
    return f"{option.description} [{f'default {default}; ' if default else ''}{option.env}]"


def metavar(option: Option) -> str:
    """The placeholder of an option's value in help texts; for a secret, that of its file."""
    if option.secret:
        return METAVARS[Path]
    if option.choices:
        return "|".join(option.choices)
    if get_origin(option.type) is list:
        return "X,X,…"
    return METAVARS[option.type]


def text(value: object) -> str:
    """A setting's value in the syntax of flags and environment variables; empty for None."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(text(part) for part in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def one_line(value: object) -> str:
    """A setting's value with line breaks escaped."""
    return text(value).replace("\n", "\\n")


def hint(flag: str, known: Iterable[str]) -> str:
    """A suffix for errors about an unknown flag, also those of Dynamo, vLLM and SGLang."""
    names = list(known)
    return foreign_flag(flag, names) or did_you_mean(flag, names)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suffix for errors about an unknown word: the nearest known one, or nothing."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
