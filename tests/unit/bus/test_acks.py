"""Streams that have stopped acknowledging."""

from kvmesh.bus.connection.acks import Acks, stream_of
from kvmesh.bus.subjects import Subjects


def test_a_stream_is_silent_after_some_timeouts_in_a_row_and_some_seconds() -> None:
    acks = Acks()
    for sent in (0.0, 2.0):
        acks.missed("kv", sent)
    assert acks.silent(10.0) == []
    acks.missed("kv", 4.0)
    assert acks.silent(3.0) == []
    assert acks.silent(6.0) == ["kv"]
    acks.arrived("kv")
    acks.missed("kv", 7.0)
    assert acks.silent(20.0) == []
    acks.reset()
    assert acks.silent(90.0) == []


def test_a_subject_names_its_stream() -> None:
    names = Subjects("mesh")
    assert stream_of(names.kv("m", "w")) == names.kv_stream
    assert stream_of(names.route("m")) == names.route_stream
    assert stream_of(f"$KV.{names.pins_bucket}.a.b") == f"KV_{names.pins_bucket}"
    assert stream_of(f"$O.{names.model_bucket}.C.x") == f"OBJ_{names.model_bucket}"
    assert stream_of("elsewhere")
