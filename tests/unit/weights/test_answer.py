"""Answers of a weights process in files."""

from pathlib import Path

import pytest

from kvmesh.weights.answer import WeightsAnswer, read_answer, wait_for_answer, write_answer
from kvmesh.weights.errors import WeightsLost


def test_an_answer_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "answer"
    assert read_answer(file) is None
    with pytest.raises(WeightsLost, match="answered"):
        wait_for_answer(file, 0.05)
    answer = WeightsAnswer(digest="abc", directory="/dev/shm/x")
    write_answer(file, answer)
    assert wait_for_answer(file, 1) == answer
    assert file.read_bytes() == b'{"digest":"abc","directory":"/dev/shm/x"}'
    write_answer(file, WeightsAnswer(disk="no source"))
    assert read_answer(file) == WeightsAnswer(disk="no source")
    assert [p.name for p in tmp_path.iterdir()] == ["answer"]


def test_a_malformed_answer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "answer").write_bytes(b"{")
    with pytest.raises(WeightsLost, match="cannot read"):
        wait_for_answer(tmp_path / "answer", 1)
