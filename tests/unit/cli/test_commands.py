"""The command line: help, version, errors, and flags generated from the settings."""

import argparse
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvmesh.cli.arguments import moment
from kvmesh.cli.flags import FlagParser, add_flags, settings_flags
from kvmesh.cli.main import MOVED, VERSION, find_command, run
from kvmesh.cli.references.options import markdown, toml
from kvmesh.cli.registry import COMMANDS, GROUPS
from kvmesh.runtime.quantities import counted, duration, size
from kvmesh.settings import Settings, load, options

DOCS = Path(__file__).parents[3] / "docs"


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line printed by a usage or settings error."""
    try:
        status: object = run(arguments)
    except SystemExit as ending:
        status = ending.code
    assert status == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["upp"], "kvmesh: unknown command upp; did you mean up?"),
        (["--port", "1"], "kvmesh: unknown flag --port"),
        (["router", "--polcy", "kv"], "unknown flag --polcy; did you mean --policy?"),
        (["router", "extra"], "extra"),
        (["router", "--policy"], "--policy"),
        (["up", "--port", "70000"], "kvmesh up: --port: expected `int` <= 65535 (got '70000')"),
        (["up", "--engine", "steam"], "kvmesh up: --engine: must be one of"),
        (["up", "--frontend-port", "x"], "--frontend-port"),
        (["worker", "--config", "/nowhere"], "/nowhere: No such file"),
        (["tail", "--since", "soon"], "soon"),
        (["tail", "a b"], "not a subject: 'a b'"),
        (["tail", "kv."], "not a subject: 'kv.'"),
        (["tail", "kvm.kv"], "a whole subject needs a namespace and a kind: kvm.kv"),
        (["tail", "--limit", "0"], "not a positive integer: '0'"),
        (["tail", "rout"], "unknown kind of message rout; did you mean route?"),
        (["tail", "kvm.kvmesh.vk.>"], "unknown kind of message vk"),
        (["tail", "--no-follow"], "kvmesh tail: --no-follow needs --since"),
        (["model", "busy", "m", "--reset", "--blocks", "3"], "--reset cannot be combined"),
        (["simulate", "demo", "--workers", "0"], "argument --workers: not a positive integer: '0'"),
        (["simulate", "demo", "--group", "two"], "--group two: expected COUNT"),
        (["simulate", "demo", "--group", "2:heat=0"], "--group 2:heat=0: Expected"),
        (["simulate", "demo", "--html", "/nowhere/x"], "no such directory: /nowhere"),
        (["simulate", "live", "--json", "/"], "/ is a directory"),
        (["workload", "generate", "demo", "-o", "/nowhere/x.json"], "no such directory: /nowhere"),
    ],
)
def test_an_error_is_one_line_that_names_the_mistake(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failed(arguments, capsys)


def test_a_bad_variable_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_UP_WORKERS", "-3")
    assert "kvmesh up: KVMESH_UP_WORKERS: " in failed(["up"], capsys)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        run([*command.split(), "--help"])
    assert ending.value.code == 0
    assert f"usage: kvmesh {command}" in capsys.readouterr().out


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ending:
        run(arguments)
    assert ending.value.code == 0
    return capsys.readouterr().out


def test_help_has_the_own_options_the_short_names_and_the_sections(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = helped(capsys, "up", "--help")
    for flag in ("--workers N", "--port N", "--policy TEXT", "--nats TEXT"):
        assert f"\n  {flag}" in shown
    assert "--router-queue" not in shown
    assert len(shown.splitlines()) < 100
    sections = " ".join(shown.splitlines()[-4:])
    assert "`kvmesh up --help SECTION`, or `all`" in sections
    assert all(section in sections for section in ("frontend", "router", "vllm", "tracing"))


@pytest.mark.parametrize("option", [["--help", "router"], ["--help=router"], ["-h", "router"]])
def test_help_about_a_section_has_its_options(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = helped(capsys, "up", *option)
    assert "--router-queue-limit" in shown
    assert "--policy TEXT" in shown
    assert "--workers" not in shown
    assert "--frontend-host" not in shown


def test_all_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    shown = helped(capsys, "up", "--help", "all")
    assert all(flag in shown for flag in ("--workers", "--router-queue-limit", "--vllm-args"))


def test_help_leaves_out_options_that_few_meshes_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--starvation-s" not in helped(capsys, "router", "--help")
    tuning = helped(capsys, "router", "--help", "tuning")
    assert "--starvation-s" in tuning
    assert "--queue-limit" not in tuning


def test_help_about_an_unknown_section_names_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = failed(["tail", "--help", "kv"], capsys)
    assert "no section kv (sections: nats, log, tuning, all)" in said


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        run([])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    nouns = [command.name for command in COMMANDS if command.is_noun]
    assert all(f"  {name} " in shown for name in nouns)
    assert all(f"\n{group}:\n" in shown for group in GROUPS)
    assert len(nouns) <= 26


@pytest.mark.parametrize("name", MOVED)
def test_a_former_command_names_the_present_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"it is kvmesh {MOVED[name]} now" in failed([name, "--help"], capsys)
    found, _ = find_command(MOVED[name].split())
    assert found is not None or MOVED[name] == VERSION


def test_version_needs_no_service_and_no_bus() -> None:
    code = (
        "import sys; from kvmesh.cli.main import run; run(['--version']); "
        "print([m for m in ('nats', 'aiohttp', 'numpy', 'rich') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert shown.stdout.splitlines() == ["kvmesh 0.2.0, cores interpreted", "[]"]


def parse(own: str, sections: tuple[str, ...], *arguments: str) -> Settings:
    parser = FlagParser(prog="test")
    add_flags(parser, own, sections)
    return load(None, {}, settings_flags(parser.parse_args(arguments)))


def test_own_options_are_bare_and_others_carry_their_section() -> None:
    settings = parse("router", ("nats", "log"), "--policy", "random", "--log-level", "debug")
    assert (settings.router.policy, settings.log.level) == ("random", "debug")


def test_up_has_short_names_for_frequent_options() -> None:
    settings = parse(
        "up", ("frontend", "router", "worker", "nats"),
        "--port", "1", "--policy", "random", "--model", "m", "--nats", "nats://h", "--workers", "9",
    )  # fmt: skip
    assert (settings.frontend.port, settings.router.policy) == (1, "random")
    assert (settings.worker.model, settings.nats.url) == (Path("m"), "nats://h")
    assert settings.up.workers == 9


def test_switches_need_no_value() -> None:
    assert parse("up", (), "--reset-states").up.reset_states
    assert not parse("up", (), "--reset-states", "--no-reset-states").up.reset_states


def test_the_settings_in_effect_are_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(toml(Settings()))
    assert load(file, {}, {}) == Settings()
    assert tomllib.loads(toml(Settings()))["up"]["workers"] == 4


def test_the_settings_in_effect_show_no_secret(tmp_path: Path) -> None:
    env = {option.env: f"hidden-{option.key}" for option in options() if option.secret}
    env |= {"KVMESH_NATS_URL": "nats://u:hidden-url@h:1", "KVMESH_REMOTE_URL": "http://u:hidden@h"}
    env["KVMESH_KVBM_REMOTE_URL"] = "redis://:hidden@h"
    shown = toml(load(None, env, {}))
    assert "hidden" not in shown
    assert "nats://***@h:1" in shown
    file = tmp_path / "mesh.toml"
    file.write_text(shown)
    assert load(file, {}, {}).nats.password is None


def test_secrets_are_no_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "", dict.fromkeys(option.section for option in options()))
    names = {name for action in parser._actions for name in action.option_strings}
    secret = [f"--{o.section}-{o.key}".replace("_", "-") for o in options() if o.secret]
    assert names.isdisjoint(secret)
    assert names.issuperset(f"{name}-file" for name in secret)


def test_the_reference_of_all_options_is_current() -> None:
    for page, tuning in (("configuration.md", False), ("tuning.md", True)):
        assert (DOCS / page).read_text().endswith(markdown(tuning)), "run `make docs`"


def test_the_page_on_the_command_line_names_every_command() -> None:
    page = (DOCS / "cli.md").read_text()
    missing = [c.name for c in COMMANDS if f"`kvmesh {c.name}" not in page]
    assert missing == [], "name it in docs/cli.md"


def test_a_moment_is_an_age_or_a_time() -> None:
    ago = datetime.now(UTC) - moment("5m")
    assert abs(ago - timedelta(minutes=5)) < timedelta(minutes=1)
    assert moment("2026-01-02T03:04:05+00:00") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with pytest.raises(argparse.ArgumentTypeError, match="soon"):
        moment("soon")
    with pytest.raises(argparse.ArgumentTypeError, match="in the future: 2999"):
        moment("2999-01-01")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (59.4, "59s"), (60, "1m"), (11100, "3h05m"), (200000, "2d07h")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB")]
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


def test_one_is_no_plural() -> None:
    found = [counted(number, "request") for number in (0, 1, 2, 1234)]
    assert found == ["0 requests", "1 request", "2 requests", "1,234 requests"]
