"""The bus options that a worker exports to vLLM's processes."""

from pathlib import Path

import pytest

from kvmesh.bus.client import BusOptions
from kvmesh.settings.secret_file import read_secret

bridge = pytest.importorskip("kvmesh.worker.engines.vllm.kvbm.bridge", reason="needs torch")


def test_credentials_and_certificates_reach_the_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bridge.BUS_OPTIONS_VARIABLE, "")
    options = BusOptions(
        url="tls://nats:4222",
        nkey_seed="SU",
        tls_ca=Path("/run/ca.pem"),
        tls_cert=Path("/run/cert.pem"),
        inbox_prefix="_INBOX.worker",
    )
    bridge.export_bus_options(options)
    assert bridge.inherited_bus_options() == options


def test_connectors_read_secrets_from_their_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(bridge.BUS_OPTIONS_VARIABLE, "")
    file = tmp_path / "password"
    file.write_text("hidden\n")
    options = BusOptions(user="mesh", password=read_secret(file))
    bridge.export_bus_options(options)
    inherited = bridge.inherited_bus_options()
    assert inherited == options
    assert inherited.password.path == file
