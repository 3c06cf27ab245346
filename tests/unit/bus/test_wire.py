"""Every message on the wire: round trips, tolerance of other versions, and its line in the tail."""

import json
from enum import EnumMeta
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields

from kvmesh.bus import messages
from kvmesh.bus.messages import MessageDecoder
from kvmesh.cli.messages import decoding
from kvmesh.cli.messages.decoding import KINDS, Undecodable, decode, plain
from kvmesh.cli.messages.one_line import WIDTH, summarise

EXAMPLES = settings(max_examples=5, database=None)
STRUCTS = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, Struct) and value is not Struct
]
# Structs outside the subjects that the tail decodes: replies, values of buckets, keys of objects.
NOT_TAILED = {
    messages.Attached,
    messages.ActiveAgentsReport,
    messages.ControlReply,
    messages.Declined,
    messages.DesiredFleet,
    messages.Done,
    messages.EventReport,
    messages.FailedStart,
    messages.Fetched,
    messages.IdleModel,
    messages.IndexCheck,
    messages.FleetReport,
    messages.Incomplete,
    messages.LearnedReport,
    messages.LearnerReport,
    messages.Lent,
    messages.OverlapReply,
    messages.NotCleared,
    messages.Parked,
    messages.UnknownBase,
    messages.Prepared,
    messages.RankEvents,
    messages.RankKey,
    messages.RankSpeed,
    messages.ModelAlias,
    messages.ChangedSettings,
    messages.SettingChange,
    messages.AliasTarget,
    messages.Refused,
    messages.Replacement,
    messages.ReplacementReport,
    messages.RollRecord,
    messages.RestingAgent,
    messages.ReturnCheck,
    messages.ReturnClass,
    messages.ReturnsReport,
    messages.Routed,
    messages.SessionPrompt,
    messages.SpeedReport,
    messages.Thresholds,
    messages.Tokens,
    messages.Wanted,
    messages.WeightOffer,
    messages.WorkReply,
}
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text("abcdefgh-/é", max_size=12),
    bytes: st.binary(min_size=0, max_size=32),
    type(None): st.none(),
    Any: st.dictionaries(st.text("abc", max_size=3), st.integers(0, 9), max_size=2),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if origin in (Union, UnionType):
        return st.one_of(*map(values, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if get_origin(hint) is Annotated:
        bounded, bounds = arguments
        # lengths are beyond those of `values`
        return values(bounded) if bounds.ge is None else st.integers(bounds.ge, bounds.le)
    if isinstance(hint, EnumMeta):
        return st.sampled_from(list(hint))
    assert issubclass(hint, Struct), hint
    return instances(hint)


def instances(cls: type[Struct]) -> st.SearchStrategy[Any]:
    """Messages of a class with every field set."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in fields(cls)})


def required(cls: type[Struct]) -> list[str]:
    return [f.name for f in fields(cls) if f.required]


def is_array(cls: type[Struct]) -> bool:
    return cls.__struct_config__.array_like


def raw(message: Struct) -> Any:
    """The message as a decoder without types sees it."""
    return msgspec.msgpack.decode(messages.encode(message), strict=False)


def parts(hint: Any) -> set[type[Struct]]:
    """All message classes within a type."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        nested = get_type_hints(hint).values()
        return {hint}.union(*(parts(field) for field in nested))
    return set().union(*(parts(argument) for argument in get_args(hint)))


def tailed() -> dict[str, list[type[Struct]]]:
    """The message classes that the tail decodes, by kind of subject."""
    top = {kind: decoding._decoders[kind].type for kind in sorted(KINDS)}
    return {
        kind: list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
        for kind, hint in top.items()
    }


@pytest.mark.parametrize("cls", STRUCTS)
def test_a_message_with_every_field_set_round_trips(cls: type[Struct]) -> None:
    decoder = MessageDecoder(cls)

    @EXAMPLES
    @given(instances(cls))
    def round_trip(message: Struct) -> None:
        assert decoder.decode(messages.encode(message)) == message

    round_trip()


@pytest.mark.parametrize("cls", STRUCTS)
def test_a_message_of_a_newer_version_is_decoded(cls: type[Struct]) -> None:
    decoder = MessageDecoder(cls)

    @EXAMPLES
    @given(instances(cls))
    def newer(message: Struct) -> None:
        content = raw(message)
        if is_array(cls):
            content = [*content, {"future": [1]}, 2]
        else:
            content["future"] = {"future": [1]}
        assert decoder.decode(messages.encode(content)) == message

    newer()


@pytest.mark.parametrize("cls", STRUCTS)
def test_a_message_of_an_older_version_gets_the_defaults(cls: type[Struct]) -> None:
    decoder = MessageDecoder(cls)
    names = required(cls)

    @EXAMPLES
    @given(instances(cls))
    def older(message: Struct) -> None:
        content = raw(message)
        if is_array(cls):
            tag = cls.__struct_config__.tag
            content = content[: len(names) + (tag is not None)]
        else:
            content = {k: v for k, v in content.items() if k in (*names, "type")}
        least = cls(**{name: getattr(message, name) for name in names})
        assert decoder.decode(messages.encode(content)) == least

    older()


@pytest.mark.parametrize("cls", [cls for cls in STRUCTS if required(cls)])
def test_a_message_without_a_required_field_is_refused(cls: type[Struct]) -> None:
    @EXAMPLES
    @given(instances(cls))
    def incomplete(message: Struct) -> None:
        content = raw(message)
        if is_array(cls):
            content = content[: len(required(cls)) - (cls.__struct_config__.tag is None)]
        else:
            del content[required(cls)[-1]]
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(messages.encode(content), type=cls)

    incomplete()


@pytest.mark.parametrize("cls", [cls for cls in STRUCTS if is_array(cls)])
def test_required_fields_of_an_array_come_first(cls: type[Struct]) -> None:
    order = [field.required for field in fields(cls)]
    assert order == sorted(order, reverse=True)


def test_tags_of_one_union_differ_and_are_short_words() -> None:
    for kind, classes in tailed().items():
        tags = [cls.__struct_config__.tag for cls in classes]
        assert len(set(tags)) == len(tags), kind
        assert all(tag is None or str(tag).isidentifier() for tag in tags), kind


def test_every_message_is_tailed_or_is_known_not_to_be() -> None:
    shown = set().union(*(parts(cls) for classes in tailed().values() for cls in classes))
    assert set(STRUCTS) - shown == NOT_TAILED


@pytest.mark.parametrize(
    ("kind", "cls"), [(kind, cls) for kind, classes in tailed().items() for cls in classes]
)
def test_every_message_has_a_line_in_the_tail(kind: str, cls: type[Struct]) -> None:
    @EXAMPLES
    @given(instances(cls))
    def line(message: Struct) -> None:
        decoded = decode(kind, messages.encode(message))
        assert decoded == message
        text = summarise(decoded)
        assert text.strip()
        assert "\n" not in text
        assert "undecodable" not in text
        if text.startswith("{"):
            assert len(text) <= WIDTH + 1
        shown = json.loads(msgspec.json.encode(plain(decoded)))
        assert shown["type"] == cls.__name__
        assert set(shown) == {"type", *cls.__struct_fields__}

    line()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\xa1x", b"\x91\xa7strange"])
def test_damaged_messages_of_each_kind_are_shown_as_such(kind: str, data: bytes) -> None:
    found = decode(kind, data)
    assert isinstance(found, Undecodable)
    assert f"undecodable, {len(data)} bytes" in summarise(found)
    assert json.loads(msgspec.json.encode(plain(found)))["type"] == "Undecodable"
