"""Asks a NATS server which subjects this connection may use, without a message to anybody.

A subscription lasts as long as the server takes to read its end, which is sent with it. A publish
names a reply subject that the server reserves for itself: it checks the permission for the subject
first, and refuses each permitted one for its reply.
"""

from kvmesh.bus.connection.direct_client import DirectClient
from kvmesh.bus.connection.refused.refusals import Refusals
from kvmesh.bus.connection.refused.violations import Violation
from kvmesh.bus.permissions import Permissions, sample_of
from kvmesh.bus.subjects import API

HARMLESS = f"{API}.INFO"  # shows first that this server refuses the reply


class ProbeFailed(Exception):
    """The server refuses no reply subject, so that publishes cannot be tried without effect."""


async def refused_subjects(
    client: DirectClient, refusals: Refusals, wanted: Permissions
) -> Permissions:
    """Those of the patterns that the server does not permit, tried by one subject each.

    Raises ProbeFailed or an error of nats-py.
    """
    heard: list[Violation] = []
    with refusals.heard_by(heard.append):
        for canary in (HARMLESS, client.new_inbox()):
            await client.probe(canary)
        await client.round_trip()
        if not any(found.reply for found in heard):
            raise ProbeFailed("publishes are not checked: this server does not permit any try")
        samples = {sample_of(pattern): pattern for pattern in wanted.publish}
        heard.clear()
        for subject in samples:
            await client.probe(subject)
        for pattern in wanted.subscribe:
            await client.probe_subscription(pattern)
        await client.round_trip()
    sent = {found.subject.casefold() for found in heard if found.publish and not found.reply}
    listened = {found.subject.casefold() for found in heard if not found.publish}
    return Permissions(
        publish=tuple(p for subject, p in samples.items() if subject.casefold() in sent),
        subscribe=tuple(p for p in wanted.subscribe if p.casefold() in listened),
    )
