"""`kvmesh secure`: the files that it writes, keeps and refuses to replace."""

import stat
from pathlib import Path

import pytest
from support.secured import secure


@pytest.mark.parametrize("more", [(), ("--jwt", "--cluster", "a,b,c")])
def test_only_the_owner_can_read_the_files(tmp_path: Path, more: tuple[str, ...]) -> None:
    folder = tmp_path / "made"
    assert secure(folder, *more).returncode == 0
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def seeds(folder: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in folder.rglob("nkey.seed")}


def test_a_second_run_adds_users_and_replaces_no_key(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    assert secure(folder).returncode == 0
    before = seeds(folder)
    assert set(before) == {
        *("frontend", "router", "indexer", "worker.worker-0", "kvbm.kvbm-0"),
        *("planner", "operator", "observer", "dashboard"),
    }
    assert len(set(before.values())) == len(before)
    assert secure(folder, "--workers", "worker-1").returncode == 0
    after = seeds(folder)
    assert {user: after[user] for user in before} == before
    assert set(after) - set(before) == {"worker.worker-1"}
    config = (folder / "nats" / "nats.conf").read_text()
    assert config.count("nkey:") == len(after)
    assert not any(seed.strip() in config for seed in after.values())
    assert secure(folder, "--force").returncode == 0
    assert set(seeds(folder).values()).isdisjoint(after.values())


def test_a_folder_with_other_contents_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    for force in ((), ("--force",)):
        done = secure(tmp_path, *force)
        assert done.returncode == 1
        assert "is not empty and contains no credentials" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_signing_requires_the_authoritys_key(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert secure(folder).returncode == 0
    (folder / "authority" / "ca.key").rename(tmp_path / "ca.key")
    done = secure(folder, "--workers", "worker-1")
    assert done.returncode == 1
    assert "ca.key is missing; restore it to sign certificates" in done.stderr


def test_each_server_of_a_cluster_has_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    done = secure(folder, "--cluster", "a,b,b:5222,[::1]", "--hosts", "nats")
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (folder / "nats").iterdir()} == {"a", "b-4222", "b-5222", "--1"}
    config = (folder / "nats" / "b-5222" / "nats.conf").read_text()
    assert 'server_name: "b-5222"' in config
    password = (folder / "authority" / "route.password").read_text()
    for route in ("a:6222", "b:6222", "[::1]:6222"):
        assert f'"tls://route:{password}@{route}"' in config
    assert 'b:7222"]' not in config
    addresses = "tls://a:4222,tls://b:4222,tls://b:5222,tls://[::1]:4222"
    env = (folder / "router" / "env").read_text().splitlines()
    assert f"KVMESH_NATS_URL={addresses}" in [line.replace("'", "") for line in env]
    assert "KVMESH_NATS_REPLICAS=3" in env


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--cluster", "a"), "two servers or more"),
        (("--cluster", "a,b,a"), "each once"),
        (("--cluster", "a,b:port"), "not an address of a server: 'b:port'"),
        (("--cluster", "a,u@b"), "not an address of a server: 'u@b'"),
        (("--expire-days", "3"), "--expire-days needs --jwt"),
    ],
)
def test_wrong_servers_are_usage_errors(tmp_path: Path, wrong: tuple[str, ...], said: str) -> None:
    done = secure(tmp_path / "made", *wrong)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("names", ["a b", "../x", "w>", ","])
def test_an_invalid_name_is_a_usage_error(tmp_path: Path, names: str) -> None:
    assert secure(tmp_path / "made", "--workers", names).returncode == 2
    assert not (tmp_path / "made").exists()


def test_a_deleted_user_cannot_connect(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert secure(folder, "--workers", "a,b").returncode == 0
    (folder / "worker.b" / "nkey.seed").unlink()
    assert secure(folder, "--workers", "a").returncode == 0
    assert "# worker.b" in (folder / "nats" / "nats.conf").read_text()  # with a new key
    for file in (folder / "worker.b").iterdir():
        file.unlink()
    (folder / "worker.b").rmdir()
    assert secure(folder, "--workers", "a").returncode == 0
    assert "worker.b" not in (folder / "nats" / "nats.conf").read_text()
