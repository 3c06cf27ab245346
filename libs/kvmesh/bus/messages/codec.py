"""Encoder of every message."""

import msgspec

encode = msgspec.msgpack.Encoder().encode
