"""Settings: their sources, the order of precedence, and error messages."""

import logging
from pathlib import Path

import pytest

from kvmesh.settings import (
    Flag,
    Option,
    Settings,
    SettingsError,
    load,
    options,
    redacted,
    to_env,
)
from kvmesh.settings.load import OptionKey


def write(folder: Path, text: str) -> Path:
    file = folder / "mesh.toml"
    file.write_text(text)
    return file


def test_without_any_source_every_option_has_its_default() -> None:
    assert load(None, {}, {}) == Settings()


def test_the_environment_wins_over_the_file_and_a_flag_over_both(tmp_path: Path) -> None:
    file = write(tmp_path, '[frontend]\nport = 1\nhost = "::"\n[up]\nworkers = 1\n')
    env = {"KVMESH_FRONTEND_PORT": "2", "KVMESH_UP_WORKERS": "2"}
    settings = load(file, env, {("up", "workers"): Flag("--workers", "3")})
    assert (settings.frontend.host, settings.frontend.port, settings.up.workers) == ("::", 2, 3)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[up]\nworkers = 7\n")
    assert load(None, {"KVMESH_CONFIG": str(file)}, {}).up.workers == 7


@pytest.mark.parametrize(
    ("name", "text", "section", "key", "value"),
    [
        ("KVMESH_UP_RESET_STATES", "yes", "up", "reset_states", True),
        ("KVMESH_UP_RESET_STATES", "TRUE", "up", "reset_states", True),
        ("KVMESH_UP_RESET_STATES", "off", "up", "reset_states", False),
        (
            "KVMESH_ROUTER_OVERLAP_CREDITS",
            "1, 0.5,0,0",
            "router",
            "overlap_credits",
            [1, 0.5, 0, 0],
        ),
        ("KVMESH_WORKER_MODEL", "/models/a", "worker", "model", Path("/models/a")),
        ("KVMESH_WORKER_MODEL", "", "worker", "model", None),
        ("KVMESH_ROUTER_SEED", "12", "router", "seed", 12),
        ("KVMESH_NATS_USER", "12", "nats", "user", "12"),
        ("KVMESH_NATS_URL", "", "nats", "url", ""),
        ("KVMESH_STREAMS_LEASE_S", "2", "streams", "lease_s", 2.0),
    ],
)
def test_text_becomes_a_typed_value(
    name: str, text: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load(None, {name: text}, {}), section), key) == value


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"KVMESH_UP_WORKERS": "-1"}, r"KVMESH_UP_WORKERS: expected `int` >= 0 \(got '-1'\)"),
        ({"KVMESH_UP_WORKERS": "many"}, r"KVMESH_UP_WORKERS: expected `int`.*'many'"),
        ({"KVMESH_UP_RESET_STATES": "maybe"}, "KVMESH_UP_RESET_STATES: .*'maybe'"),
        (
            {"KVMESH_LOG_LEVEL": "loud"},
            r"KVMESH_LOG_LEVEL: must be one of debug, info, warning, error \(got 'loud'\)",
        ),
        ({"KVMESH_NATS_NAMESPACE": "a.b"}, "KVMESH_NATS_NAMESPACE: .*regex.*'a.b'"),
        ({"KVMESH_ROUTER_OVERLAP_CREDITS": "1,2"}, "KVMESH_ROUTER_OVERLAP_CREDITS: .*'1,2'"),
        ({"KVMESH_CONFIG": "/nowhere.toml"}, r"/nowhere\.toml: No such file"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(env: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load(None, env, {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[rooter]\n", r"unknown section \[rooter\]; did you mean router\?"),
        ("[router]\npolcy = 'kv'\n", r"unknown key router\.polcy; did you mean policy\?"),
        ("[router]\nzzz = 1\n", r"unknown key router\.zzz$"),
        ("[kvbm]\neviction = 'lru'\n", r"unknown key kvbm\.eviction: recency orders eviction"),
        ("[router]\npolicy = 1\n", r"router\.policy: expected `str`, got `int` \(got 1\)"),
        ("[worker]\nmodel = 1\n", r"worker\.model: expected a path, got `int`"),
        ("[up]\nworkers = '4'\n", r"up\.workers: expected `int`, got `str`"),
        ("router = 1\n", r"router: expected a table, \[router\]"),
        ("[router\n", "line 1"),
    ],
)
def test_a_bad_file_is_named_with_the_key(tmp_path: Path, content: str, said: str) -> None:
    file = write(tmp_path, content)
    with pytest.raises(SettingsError, match=said) as caught:
        load(file, {}, {})
    assert caught.value.where.startswith(str(file))


def test_all_bad_keys_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "[router]\npolcy = 'kv'\nname = 'a'\n[rooter]\n[up]\nworkers = 'x'\n")
    with pytest.raises(SettingsError) as caught:
        load(file, {}, {})
    assert str(caught.value) == (
        f"{file}: unknown key router.polcy; did you mean policy?; unknown section [rooter]; did "
        "you mean router?; up.workers: expected `int`, got `str` (got 'x')"
    )
    file = write(tmp_path, "[router]\n" + "".join(f"zzz{n} = 1\n" for n in range(25)))
    with pytest.raises(SettingsError, match=r"zzz19; and 5 more$"):
        load(file, {}, {})


def test_a_bad_flag_is_named_as_it_was_written() -> None:
    place: OptionKey = ("frontend", "port")
    with pytest.raises(SettingsError, match=r"^--port: .*65535.*'70000'"):
        load(None, {}, {place: Flag("--port", "70000")})


def test_an_unknown_variable_is_reported_but_harmless(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        env = {"KVMESH_ROUTER_POLCY": "kv", "KVMESH_OTHER": "1", "PATH": "/bin"}
        load(None, env | {"KVMESH_WORKER_EVICTION": "lru"}, {})
    assert [record.getMessage() for record in caplog.records] == [
        "ignored unknown environment variable KVMESH_ROUTER_POLCY; "
        "did you mean KVMESH_ROUTER_POLICY?",
        "ignored unknown environment variable KVMESH_WORKER_EVICTION: recency orders eviction",
    ]


def test_the_environment_of_a_child_carries_the_settings(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "[router]\noverlap_credits = [1, 0.5, 0.25, 0]\nseed = 3\n[up]\nreset_states = true\n"
        '[worker]\nmodel = "/models/a b"\n[streams]\nlease_s = 1.5\n',
    )
    settings = load(file, {}, {})
    env = to_env(settings)
    assert load(None, env, {}) == settings
    assert set(env) == {
        "KVMESH_ROUTER_OVERLAP_CREDITS",
        "KVMESH_ROUTER_SEED",
        "KVMESH_UP_RESET_STATES",
        "KVMESH_WORKER_MODEL",
        "KVMESH_STREAMS_LEASE_S",
    }


def test_every_option_is_described_and_named_once() -> None:
    found = list(options())
    assert all(option.description for option in found)
    assert len({option.env for option in found}) == len(found)


SECRETS = [option for option in options() if option.secret]


@pytest.mark.parametrize("option", SECRETS, ids=lambda o: o.env)
def test_a_secret_may_be_in_a_file(tmp_path: Path, option: Option) -> None:
    file = tmp_path / "secret"
    file.write_text(" hidden\n")
    toml = write(tmp_path, f"[{option.section}]\n{option.file_key} = '{file}'\n")
    flag = Flag("--secret-file", str(file))
    for found in (
        load(None, {option.file_env: str(file)}, {}),
        load(toml, {}, {}),
        load(None, {option.env: "other"}, {(option.section, option.file_key): flag}),
    ):
        assert getattr(getattr(found, option.section), option.key) == "hidden"


@pytest.mark.parametrize("option", SECRETS, ids=lambda o: o.env)
def test_a_secrets_file_that_cannot_be_used_is_named_with_its_setting(
    tmp_path: Path, option: Option
) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(SettingsError, match=f"{option.file_env}: cannot read {missing}: No such"):
        load(None, {option.file_env: str(missing)}, {})
    missing.write_text("\n")
    with pytest.raises(SettingsError, match=f"{option.file_env}: {missing} is empty"):
        load(None, {option.file_env: str(missing)}, {})
    with pytest.raises(SettingsError, match=f"{option.file_env}: {option.env} is given as well"):
        load(None, {option.file_env: str(missing), option.env: "x"}, {})
    toml = write(tmp_path, f"[{option.section}]\n{option.file_key} = 1\n")
    with pytest.raises(SettingsError, match="expected a path"):
        load(toml, {}, {})


def test_an_unfit_secret_is_not_repeated(tmp_path: Path) -> None:
    toml = write(tmp_path, "[nats]\npassword = 31415926\n")
    with pytest.raises(SettingsError) as raised:
        load(toml, {}, {})
    assert "31415926" not in str(raised.value)


def test_every_option_that_sounds_like_a_secret_is_one() -> None:
    public = {"overlap_credits", "keys_file", "keys_bucket", "credentials", "tls_key"}
    words = ("password", "token", "secret", "key", "seed", "credential")
    named = [
        option
        for option in options()
        if any(word in option.key for word in words)
        and option.type is str
        and option.key not in public
    ]
    assert [option.env for option in named if not option.secret] == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://h:4222", "nats://h:4222"),
        ("nats://user:p@ss@h:1,tls://token@i:2", "nats://***@h:1,tls://***@i:2"),
        ("nats://user:a,b/c@h", "nats://***@h"),
        ("user:pass@h:1,i:2", "***@h:1,i:2"),
        ("redis://:secret@h/0?timeout=1", "redis://***@h/0?timeout=1"),
        ("redis://h/0?password=secret&db=1", "redis://h/0?password=***&db=1"),
    ],
)
def test_urls_are_shown_without_who_uses_them(url: str, shown: str) -> None:
    assert redacted(url) == shown
