"""Streams that have stopped acknowledging, or refuse what is stored."""

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
    acks.arrived("kv", 6.0)
    acks.missed("kv", 7.0)
    assert acks.silent(20.0) == []
    acks.reset()
    assert acks.silent(90.0) == []


def test_a_refusal_counts_until_something_is_stored_and_for_a_minute() -> None:
    acks = Acks()
    acks.missed("kv", 1.0)
    acks.arrived("kv", 2.0, "full")
    assert (acks.silent(9.0), list(acks.refused(9.0))) == ([], [("kv", "full")])
    assert list(acks.refused(70.0)) == []
    acks.arrived("kv", 10.0)
    assert list(acks.refused(11.0)) == []


def test_a_subject_names_its_stream() -> None:
    names = Subjects("mesh")
    assert stream_of(names.kv("m", "w")) == names.kv_stream
    assert stream_of(names.route("m")) == names.route_stream
    assert stream_of(f"$KV.{names.pins_bucket}.a.b") == f"KV_{names.pins_bucket}"
    assert stream_of(f"$O.{names.model_bucket}.C.x") == f"OBJ_{names.model_bucket}"
    assert stream_of("elsewhere")


def test_an_acknowledgement_of_a_request_is_no_reply_and_names_the_stream() -> None:
    names, acks = Subjects("mesh"), Acks()
    ack = b'{"stream":"archive", "seq":7}'
    assert acks.is_foreign(names.work("w-1"), ack, 1.0)
    refusal = b'{"error":{"code":503},"stream":"archive","seq":0}'
    assert acks.is_foreign(names.router("m"), refusal, 2.0)
    assert list(acks.foreign(3.0)) == [("archive", "kvm.mesh.router.>")]
    assert list(acks.foreign(70.0)) == []
    own = b'{"stream":"kvm-mesh-kv", "seq":7}'
    assert not acks.is_foreign(names.kv("m", "w"), own, 1.0)
    for subject, data in (("$KV.b.k", ack), (names.work("w-1"), b"{"), (names.work("w-1"), b"{}")):
        assert not acks.is_foreign(subject, data, 1.0)
