"""The reply subjects of a consumer's deliveries, in both layouts of nats-server. Pure.

`$JS.ACK.<stream>.<consumer>.…` is the older one; `$JS.ACK.<domain>.<account>.<stream>.…` is that of
a server with `js_ack_fc_v2`. Source: ADR-15 of https://github.com/nats-io/nats-architecture-and-design
"""

OLDER_FIELDS = 9
PREFIX = "$JS.ACK."


def delivery_fields(reply: str) -> list[str]:
    """Stream, consumer, attempts, sequences in stream and consumer, Unix ns, pending messages."""
    fields = reply.split(".")
    return fields[2:] if len(fields) == OLDER_FIELDS else fields[4:]


def in_older_layout(reply: bytes) -> bytes:
    """The same subject for nats-py, whose ordered consumers know the older layout alone."""
    return ".".join([PREFIX[:-1], *delivery_fields(reply.decode())[:7]]).encode()
