"""Encoder of all messages, and the kind of a message before it is decoded."""

import msgspec

TAG = b"outcome"
TAG_WITHIN = 32  # bytes: the tag is the first field of a message
encode = msgspec.msgpack.Encoder().encode


def is_outcome(data: bytes) -> bool:
    """True for an encoded `Outcome`, of the messages of the route stream."""
    return TAG in data[:TAG_WITHIN]
