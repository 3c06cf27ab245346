"""States of loaded adapters."""

import pytest

from kvmesh.bus.messages import adapter_identity, adapter_name, is_adapter_name
from kvmesh.worker.lora.folder import AdapterError
from kvmesh.worker.lora.table import AdapterTable, State

A1, A2, A3 = (adapter_identity("a", digit * 16) for digit in "123")
B1, C1 = (adapter_identity(name, "1" * 16) for name in "bc")


def test_an_identity_is_the_name_and_a_digest() -> None:
    assert adapter_name(A1) == "a"
    assert adapter_name(adapter_identity("x:y/z", "0123456789abcdef")) == "x:y/z"
    for bare in ("plain", "a@b", "a@0123456789ABCDEF", "@0123456789abcdef"):
        assert adapter_name(bare) == bare
    assert is_adapter_name("org/poet-v1.2:beta")
    for bad in ("", "a b", "a@b", "-a", "x" * 129, "ä", "a\n"):
        assert not is_adapter_name(bad)


def test_a_replaced_adapter_comes_after_those_served_and_can_return() -> None:
    table = AdapterTable([A1, B1], 2)
    assert table.serve(A2) == A1
    assert table.listed == [B1, A2, A1]
    assert table.served("a") == A2
    assert table.serve(A1) == A2
    assert table.listed == [A1, B1, A2]
    assert table.serve(A1) is None
    table.leave(A2)
    assert table.listed == [A1, B1]
    assert table.state(A2) is State.LEAVING
    table.remove(A2)
    assert table.state(A2) is None


def test_a_withdrawn_name_has_no_adapter_on_the_card() -> None:
    table = AdapterTable([A1, B1], 2)
    table.serve(A2)
    assert table.withdraw("a") == A2
    assert table.listed == [B1]
    with pytest.raises(AdapterError, match="there is no adapter a"):
        table.withdraw("a")


def test_one_more_than_the_limit_is_loaded_while_one_is_replaced() -> None:
    table = AdapterTable([A1, B1], 2)
    with pytest.raises(AdapterError, match="2 adapters are loaded, as many"):
        table.can_load(C1)
    assert table.can_load(A2)
    table.serve(A2)
    assert not table.can_load(A3), "until the first one has been unloaded"
    assert table.can_load(A1), "it is loaded still"
    table.leave(A1)
    assert not table.can_load(A3)
    table.remove(A1)
    assert table.can_load(A3)
