"""Errors that a limit or a setting causes: its name, and where it is raised.

JetStream's codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json
"""

STREAM_EXISTS = 10058  # with another configuration
WRONG_LAST_SEQUENCE = 10071
NOT_STORED = 10077
TOO_MANY_CONSUMERS = 10026
BYTES_REQUIRED = 10113
NOT_FOR_ACCOUNT = 10039
# of the account or of the server: `server_check` tells which
ACCOUNT_FULL, RESOURCES, MEMORY_FULL, FILES_FULL = 10002, 10023, 10028, 10047

_ACCOUNT = "in the account's jetstream limits"
ADVICE = {
    10005: "no server of the cluster can hold it: one is offline, full or without the tags of its"
    " placement, or there are fewer than nats.replicas",
    10009: "no server of the cluster can hold it: one is offline or full",
    TOO_MANY_CONSUMERS: f"raise max_consumers {_ACCOUNT} (`consumer` in its JWT)",
    10027: f"raise max_streams {_ACCOUNT} (`streams` in its JWT)",
    NOT_FOR_ACCOUNT: "add `jetstream: enabled` to the account in the server's configuration,"
    " or `disk_storage` and `mem_storage` to its JWT",
    10074: "its cluster has fewer servers than nats.replicas",
    10076: "add jetstream { store_dir: … } to the server's configuration",
    BYTES_REQUIRED: f"the account has max_bytes_required {_ACCOUNT}",
    10120: "the account's JWT has limits for other numbers of replicas only: set nats.replicas to"
    " one of those, or add a tier",
    10122: f"raise disk_max_stream_bytes or mem_max_stream_bytes {_ACCOUNT} (so named in its JWT,"
    " too), or lower the *_bytes of [streams]",
}


# texts of the server's -ERR, in lower case
TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"
LIMITS = {
    "maximum connections exceeded": "max_connections of the server's configuration",
    "maximum account active connections exceeded": "max_connections in the limits of the account"
    " (`conn` in its JWT)",
    TOO_MANY_SUBSCRIPTIONS: "max_subscriptions of the server's configuration or in the limits of"
    " the account (`subs` in its JWT)",
}


def with_limit(text: str) -> str:
    """The text of an -ERR, with the limit behind it where that is known."""
    limit = LIMITS.get(text.lower())
    return f"{text[0].lower()}{text[1:]}: raise {limit}" if limit is not None else text


def explained(description: str, err_code: int | None) -> str:
    """The text of an error, with the limit or setting behind it where that is known."""
    code = f" ({err_code})" if err_code is not None else ""
    advice = ADVICE.get(err_code or 0, "")
    return f"JetStream: {description}{code}{': ' if advice else ''}{advice}"
