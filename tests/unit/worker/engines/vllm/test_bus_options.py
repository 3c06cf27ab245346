"""The bus options that a worker exports to vLLM's processes."""

from pathlib import Path

import pytest

from kvmesh.bus.client import BusOptions

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
