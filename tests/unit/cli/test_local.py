"""Files of this machine that hold secrets."""

import resource
from pathlib import Path

import pytest

from kvmesh.cli.local import write_private


def test_a_private_file_that_cannot_be_written_is_named_and_stays_as_it_was(
    tmp_path: Path,
) -> None:
    file = tmp_path / "secret"
    write_private(file, "former")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(OSError, match="secret") as raised:
            write_private(file, "another")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(file)
    assert file.read_text() == "former"
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
