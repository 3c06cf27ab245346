"""`kvmesh fanout`: times of starts by topology."""

import pytest

from kvmesh.cli.main import main


def fanout(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["fanout", *arguments])
    return int(ended.value.code or 0)


def test_the_stream_stands_beside_other_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    assert fanout("--targets", "2,8", "--size", "64Mi", "--chunk", "1Mi") == 0
    out = capsys.readouterr().out
    for name in ("stream", "central", "finished", "least"):
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--targets", "0"), "argument --targets"),
        (("--size", "0"), "argument --size"),
        (("--fault", "asleep:0.1"), "argument --fault"),
    ],
)
def test_wrong_numbers_are_refused(
    arguments: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fanout(*arguments) == 2
    assert words in capsys.readouterr().err
