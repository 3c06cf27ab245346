"""The permission errors of a NATS server's `-ERR`, of all its versions. Pure."""

import re
from dataclasses import dataclass

PROBE_REPLY = "_R_."  # the server's own prefix: no client may name such a reply
# nats-py lowercases the text; servers append the queue and, after a reload, the subscription's id
_VIOLATION = re.compile(
    r'permissions violation for (publish|subscription) (to|with reply of) "([^"]+)"'
    r'(?: using queue "[^"]*")?(?: \(sid "(\d+)"\))?',
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Violation:
    """A refused publish or subscription; `sid` is the subscription's id if the server says it."""

    publish: bool
    subject: str
    sid: int | None = None
    reply: bool = False  # `subject` is the reply's; the publish itself is permitted


def violation(text: str) -> Violation | None:
    """The violation that an error's text reports, if any; the subject may be in lower case."""
    found = _VIOLATION.search(text)
    if found is None:
        return None
    kind, preposition, subject, sid = found.groups()
    return Violation(
        publish=kind.lower() == "publish",
        subject=subject,
        sid=int(sid) if sid else None,
        reply=preposition.lower() != "to",
    )
