"""Secrets in files: read again while a process runs, and handed on by their path."""

from pathlib import Path

import pytest

from kvmesh.settings import load, to_env
from kvmesh.settings.secret_file import SecretUnreadable, present


def test_a_secret_is_read_again_and_processes_get_its_path(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\r\n")
    settings = load(None, {"KVMESH_NATS_TOKEN_FILE": str(file), "KVMESH_NATS_PASSWORD": "x"}, {})
    token = settings.nats.token
    assert token == "one"
    env = to_env(settings)
    assert env == {"KVMESH_NATS_TOKEN_FILE": str(file), "KVMESH_NATS_PASSWORD": "x"}
    assert load(None, env, {}) == settings
    file.write_text("two\n")
    assert present(token) == "two"
    assert present("plain") == "plain"
    file.unlink()
    with pytest.raises(SecretUnreadable, match=f"cannot read {file}: No such file"):
        present(token)
