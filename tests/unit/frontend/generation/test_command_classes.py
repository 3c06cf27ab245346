"""Classes of shell commands: the slowest program decides, and no word of the command leaks."""

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.generation.command_classes import (
    BACKGROUND,
    OTHER,
    RANKS,
    SUBCOMMANDS,
    command_class,
)

VOCABULARY = {
    *(OTHER, BACKGROUND, "sleep"),
    *(f"{2**exponent}s" for exponent in range(13)),
    *RANKS,
    *(f"{program} {word}" for program, words in SUBCOMMANDS.items() for word in words),
}


@pytest.mark.parametrize(
    ("command", "labels"),
    [
        ("ls -la src", ["ls"]),
        ("npm test", ["npm test"]),
        ("npm --prefix web run build", ["npm build"]),
        ("npm run deploy-everything", ["npm run"]),
        ("git -C /repo commit -m 'sleep 9 && npm test'", ["git commit"]),
        ("cd /repo && ls && pytest -x | tail -5", ["pytest"]),
        ("git status; git push", ["git status"]),
        ("echo first\nmake lint", ["make lint"]),
        ("FOO=bar timeout -k 5 60 cargo build --release", ["cargo build"]),
        ("sudo -E apt-get install -y jq", ["apt-get install"]),
        ("bash -lc 'cd web && npm test'", ["npm test"]),
        ("uv run --quiet pytest", ["pytest"]),
        (".venv/bin/python -m pytest tests", ["pytest"]),
        ("python -m my_module", ["python"]),
        ("./gradlew test", ["gradlew test"]),
        ("./deploy.sh production", [OTHER]),
        ("bash deploy.sh", [OTHER]),
        ("for i in 1 2; do sleep 5; done", ["sleep", "8s"]),
        ("sleep 90 && curl localhost", ["sleep", "128s"]),
        ("sleep 2m", ["sleep", "128s"]),
        ("sleep 1d", ["sleep", "4096s"]),
        ("sleep 0.1", ["sleep", "1s"]),
        ("sleep $DELAY", ["sleep"]),
        ("npm start &", [BACKGROUND]),
        ("npm start & sleep 3", ["sleep", "4s"]),
        ("make 2>&1 | tee log", ["make"]),
        ("cat > run.sh <<'END'\nsleep 100\nEND", ["cat"]),
        ("cat > t.py <<END\nsleep 100\nEND\npytest t.py", ["pytest"]),
        ("python - <<'END'\nimport npm\nEND", ["python"]),
        ("cd /a && wc -l f", ["wc"]),
        ("cd /a", ["cd"]),
        ("cd /a && pushd b", ["cd"]),
        ("cd /a; make", ["make"]),
        ("cd '/a b' && make || true", ["make"]),
        ("(cd /a && wc -l f)", ["wc"]),
        ("pushd /a > /dev/null && wc -l f; popd", ["wc"]),
        ("set -euo pipefail; wc -l f", ["wc"]),
        ("export A=1 && wc -l f", ["wc"]),
        ("source .venv/bin/activate && wc -l f", ["wc"]),
        (". .venv/bin/activate && ruff check", ["ruff"]),
        (". .venv/bin/activate", ["source"]),
        ("A=1 B='x y' wc -l f", ["wc"]),
        ('cd /a && A="x y" make test', ["make test"]),
        ("echo start; wc -l f; echo done", ["wc"]),
        ("echo one && echo two", ["echo"]),
        ("printf x | wc -c", ["wc"]),
        ("wc -l f || true", ["wc"]),
        ("true && wc -l f", ["wc"]),
        ("[ -f f ] && wc -l f", ["wc"]),
        ("if [[ -f f ]]; then wc -l f; fi", ["wc"]),
        ("for f in *; do wc -l $f; done", ["wc"]),
        ("while true; do sleep 5; done", ["sleep", "8s"]),
        ("# count\ncd /a\nwc -l f", ["wc"]),
        ("cd /a && wc \\\n  -l f", ["wc"]),
        ("cd /a || exit 1; wc -l f || exit 2", ["wc"]),
        ("declare -x A=1; umask 022 && wc -l f", ["wc"]),
        ("cd /a; { wc -l f; }", ["wc"]),
        ("exit 1", [OTHER]),
        ("cd /a && npm start &", [BACKGROUND]),
        ("npm start & wc -l f", ["wc"]),
        ("cd /a && ./deploy.sh", [OTHER]),
        ("bash -c 'cd /a && wc -l f'", ["wc"]),
        ("", [OTHER]),
        ("'", [OTHER]),
    ],
)
def test_the_slowest_program_is_the_class(command: str, labels: list[str]) -> None:
    assert list(command_class(command).labels) == labels


def test_a_longer_rank_means_a_slower_program() -> None:
    ranks = [command_class(each).rank for each in ("ls", "git log", "x", "python", "make", "sleep")]
    assert ranks == sorted(set(ranks))


PIECES = (
    *RANKS,
    *SUBCOMMANDS["git"],
    *("sleep 5", "bash -c", "sudo", "env", "timeout 7", "npm run", "-m", "<<", "END"),
    *("&&", ";", "|", "&", "\n", "'", '"', "\\", "(", ")"),
    *("TOKEN=hunter2", "/home/ann/secret.txt"),
)
COMMANDS = st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join)


@given(st.one_of(st.text(max_size=300), COMMANDS))
def test_a_class_consists_of_known_words(command: str) -> None:
    assert set(command_class(command).labels) <= VOCABULARY


@pytest.mark.parametrize("word", ["'", '"\\', "a", "bash -c ", "sudo ", "X=1 ", "& ", "$(", "\n"])
def test_a_huge_command_has_a_class(word: str) -> None:
    assert set(command_class(word * 100_000).labels) <= VOCABULARY


@pytest.mark.parametrize("command", [" " * 2048, "<<" + " " * 2046, "a" + "\t" * 2046 + "\\"])
def test_blanks_cost_no_more_than_words(command: str) -> None:
    assert _seconds(command) < 10 * _seconds("a " * 1024)


def _seconds(command: str) -> float:
    times = []
    for _ in range(3):
        start = process_time()
        command_class(command)
        times.append(process_time() - start)
    return min(times)
