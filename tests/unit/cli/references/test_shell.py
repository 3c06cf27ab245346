"""Completion scripts and the manual page, made of the parsers of all commands."""

import subprocess
from pathlib import Path

import pytest

from kvmesh.cli.main import run
from kvmesh.cli.references import shell
from kvmesh.cli.registry import COMMANDS

CASES = [
    ("kvmesh ro", {"router"}),
    ("kvmesh fleet ro", {"role", "roll"}),
    ("kvmesh fleet roll --wa", {"--watch"}),
    ("kvmesh fleet role worker-0 d", {"decode"}),
    ("kvmesh plan le", {"learned"}),
    ("kvmesh simulate l", {"live"}),
    ("kvmesh frontend --linger", {"--linger-s"}),
]


def completed(script: Path, line: str) -> set[str]:
    """The words that bash would offer for the end of the line."""
    words = line.split(" ")
    text = (
        f". {script}\n"
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        f"COMP_LINE={line!r}; COMP_POINT={len(line)}\n"
        f"{{ function={'$'}(complete -p kvmesh | sed 's/.*-F \\([^ ]*\\).*/\\1/'); }}\n"
        f'$function kvmesh {words[-1]!r} {words[-2]!r}; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    result = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    return {word.strip() for word in result.stdout.splitlines() if word.strip()}


def test_bash_completes_commands_flags_and_choices(tmp_path: Path) -> None:
    script = tmp_path / "kvmesh.bash"
    script.write_text(shell.completion("bash"))
    for line, words in CASES:
        assert completed(script, line) == words, line


@pytest.mark.parametrize("name", ["zsh", "tcsh"])
def test_other_shells_have_every_command(name: str) -> None:
    script = shell.completion(name)
    assert [command.name for command in COMMANDS if command.name.split()[-1] not in script] == []


def test_the_manual_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "completion", "man"]) == 0
    page = capsys.readouterr().out
    assert page.startswith('.TH KVMESH "1"')
    assert [command.name for command in COMMANDS if command.name not in page] == []


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shell, "find_spec", lambda _: None)
    assert run(["config", "completion", "bash"]) == 1
    assert "pip install 'kvmesh[shell]'" in capsys.readouterr().err
