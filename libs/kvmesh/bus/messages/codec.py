"""Encoder of all messages."""

import msgspec

encode = msgspec.msgpack.Encoder().encode
