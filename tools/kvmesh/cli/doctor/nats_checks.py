"""Checks of the NATS servers, their streams and limits. Pure functions of the facts."""

from collections import defaultdict
from collections.abc import Iterator

from kvmesh.bus.streams.server_check import MIN_PAYLOAD, OLDEST, RECOMMENDED_PAYLOAD
from kvmesh.cli.doctor.facts import MAPPINGS, Facts, UsedLimit
from kvmesh.cli.status.findings import Finding, Severity
from kvmesh.runtime.quantities import size

NEAR = 0.8  # share of a limit
SKEW_S = 2.0
LATE_S = 10.0  # messages of an outage are stored as late as this without a wrong clock
RECOMMENDED_BYTES = 8 << 20
NEEDED_FOR = {
    "kv": "indexers do not learn what workers cache",
    "route": "decisions and outcomes are lost",
    "seq": "routers do not know each other's requests",
    "scaling": "decisions of planners are lost",
    "instances": "processes do not see each other",
    "router": "busy thresholds cannot be set",
    "kvbm": "block managers have no common key",
    "plan": "planners and operators do not reach each other",
    "weights": "workers have no common key for weights",
    "index": "indexers store no snapshots",
    "models": "frontends cannot read tokenizers",
}


def server(facts: Facts) -> Iterator[Finding]:
    if facts.unfit:
        yield Finding("fault", "nats", facts.unfit)
    else:
        domain = f", JetStream domain {facts.domain}" if facts.domain else ""
        others = f", one of {len(facts.servers)} servers" if len(facts.servers) > 1 else ""
        yield Finding("ok", "nats", f"{facts.version} at {facts.server}{others}{domain}")


def answers(facts: Facts) -> Iterator[Finding]:
    """One finding for all questions that have failed for the same reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for question, reason in facts.unanswered.items():
        by_reason[reason].append(question)
    for reason, questions in by_reason.items():
        hint = ""
        if facts.clustered and "no answer" in reason:
            hint = "; if fewer than half of the cluster's servers are connected, it has no leader"
        yield Finding("fault", "nats", f"{', '.join(questions)}: {reason}{hint}")
    refused = [question for question in facts.refused if question != MAPPINGS]
    if refused:
        severity: Severity = "fault" if {"streams", "processes"} & {*refused} else "note"
        what = ", ".join(refused)
        yield Finding(severity, "nats", f"not checked: {what}; this user may not, an operator may")
    if MAPPINGS in facts.refused:
        text = f"not checked: {MAPPINGS}; only a user without permissions may probe for them"
        yield Finding("note", "nats", text)


def version(facts: Facts) -> Iterator[Finding]:
    versions = {each.name: each.version for each in facts.servers}
    for name, found in (versions or {facts.server: facts.version}).items():
        if found and _numbers(found) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            yield Finding("fault", "nats", f"{name} runs {found}: kvmesh needs {oldest} or later")
    if len(set(versions.values())) > 1:
        all_of = ", ".join(sorted(set(versions.values()), key=_numbers))
        yield Finding("note", "nats", f"servers of several versions: {all_of}")


def streams(facts: Facts) -> Iterator[Finding]:
    if facts.streams is None:
        return
    if not facts.streams and not facts.leaderless:
        yield Finding("fault", "mesh", f"no mesh is named {facts.namespace}{elsewhere(facts)}")
        return
    for name in facts.absent:
        effect = NEEDED_FOR.get(name.rpartition("-")[2], "")
        yield Finding("fault", name, f"this stream is missing{f': {effect}' if effect else ''}")
    silent: dict[str, list[str]] = defaultdict(list)
    for name, reason in facts.leaderless.items():
        silent[reason].append(name)
    for reason, names in silent.items():
        yield Finding("fault", "streams", f"no answer about {_some(names)}: {reason}")
    for name, faults in facts.altered.items():
        for fault in faults:
            text, _, remedy = fault.partition(": ")
            yield Finding("fault", name, f"this stream {text}", action=remedy)
    for difference in facts.differences:
        if difference.limit != "num_replicas":  # `replicas` has those
            yield Finding("note", "streams", f"{difference} for this command")
    if not (facts.absent or facts.leaderless or facts.altered):
        yield Finding("ok", "streams", f"{len(facts.streams)}, none is missing")


def elsewhere(facts: Facts) -> str:
    """Places in which the mesh may be instead, as the end of a sentence."""
    found = []
    if facts.others:
        names = ", ".join(facts.others)
        found.append(f"this account has meshes named {names} (set nats.namespace)")
    if facts.domain:
        found.append(
            f"this is the JetStream domain {facts.domain}, and a mesh in another domain, as that of"
            " a hub, is not seen here"
        )
    return f": {'; '.join(found)}" if found else ""


def replicas(facts: Facts) -> Iterator[Finding]:
    """Replicas beside the number of servers, and that of the setting."""
    if facts.replicas > 1 and not facts.clustered:
        text = f"nats.replicas is {facts.replicas}, but the server is in no cluster"
        yield Finding("fault", "replicas", f"{text}: streams cannot be created")
    elif facts.all_servers and facts.replicas > len(facts.servers):
        text = f"nats.replicas is {facts.replicas}, servers that reply: {len(facts.servers)}"
        yield Finding("fault", "replicas", f"{text}: streams cannot be created")
    by_number: dict[int, list[str]] = defaultdict(list)
    for name, info in (facts.streams or {}).items():
        by_number[info.config.num_replicas or 1].append(name)
    alone = by_number.get(1, [])
    if facts.clustered and alone:
        text = f"{_some(alone)} on one server of the cluster only: its loss stops the mesh"
        advice = "set nats.replicas to 3, run `kvmesh config streams apply --nats-replicas 3`"
        yield Finding("fault", "replicas", f"{text}; {advice}")
        return
    by_number.pop(facts.replicas, None)
    if other := [name for names in by_number.values() for name in names]:
        text = f"{_some(other)} with another number of replicas than nats.replicas of this command"
        yield Finding("note", "replicas", f"{text}, {facts.replicas}")


def peers(facts: Facts) -> Iterator[Finding]:
    """Leaders and replicas of streams, by server."""
    offline: dict[str, list[str]] = defaultdict(list)
    behind: dict[str, list[str]] = defaultdict(list)
    replicated = 0
    replied = {each.name for each in facts.servers}
    for name, info in (facts.streams or {}).items():
        if info.cluster is None:
            continue
        if facts.clustered and not info.cluster.leader:
            yield Finding("fault", name, "this stream has no leader: most of its servers are away")
        replicated += bool(info.cluster.replicas)
        for peer in info.cluster.replicas or []:
            # a cluster calls a lost server offline after a while only
            if peer.offline or (facts.all_servers and peer.name not in replied):
                offline[peer.name or "?"].append(name)
            elif not peer.current:
                behind[peer.name or "?"].append(name)
    for server_name, names in offline.items():
        yield Finding("fault", server_name, f"this server is offline for {_some(names)}")
    for server_name, names in behind.items():
        yield Finding("fault", server_name, f"this server is behind in {_some(names)}")
    if replicated and not (offline or behind):
        yield Finding("ok", "replicas", f"all replicas of {replicated} streams are current")


def limits(facts: Facts) -> Iterator[Finding]:
    if MIN_PAYLOAD <= facts.max_payload < RECOMMENDED_BYTES:
        text = f"max_payload is {size(facts.max_payload)}: long prompts are refused"
        yield Finding("note", "limits", f"{text}, set it to {RECOMMENDED_PAYLOAD}")
    uses = [*facts.uses, *_uses_of_streams(facts)]
    near = [use for use in uses if use.share >= NEAR]
    for use in near:
        severity: Severity = "fault" if use.share >= 1 else "note"
        yield Finding(severity, "limits", f"near its limit: {_use(use)}")
    if uses and not near:
        yield Finding("ok", "limits", f"nearest: {_use(max(uses, key=lambda u: u.share))}")
    if facts.servers:
        count = sum(each.connections for each in facts.servers)
        yield Finding("ok", "limits", f"{count} connections of this account")


def _uses_of_streams(facts: Facts) -> Iterator[UsedLimit]:
    """The sizes of those streams that refuse what exceeds them; others drop the oldest."""
    for name, info in (facts.streams or {}).items():
        most = info.config.max_bytes or 0
        if most > 0 and info.config.discard == "new":
            yield UsedLimit(f"max_bytes of {name}", info.state.bytes, most, True)


def mappings(facts: Facts) -> Iterator[Finding]:
    if facts.lost is None:
        return
    for subject in facts.lost:
        text = f"messages on {subject} do not arrive: does a subject mapping of the account move or"
        yield Finding("fault", "mappings", f"{text} drop them?")
    for stream, subject in (facts.astray or {}).items():
        text = f"messages on {subject} do not reach stream {stream}: has it other subjects, or does"
        yield Finding("fault", "mappings", f"{text} a subject mapping of the account move them?")
    for subject, other in facts.moved.items():
        text = f"messages on {subject} reach their stream on {other}, where nobody looks for them:"
        yield Finding("fault", "mappings", f"{text} a subject mapping of the account moves them")
    if not (facts.lost or facts.astray or facts.moved):
        streams = " and streams" if facts.astray is not None else ""
        text = f"messages arrive on the subjects of the mesh's requests{streams}"
        yield Finding("ok", "mappings", text)


def replies(facts: Facts) -> Iterator[Finding]:
    """The layout of the reply subjects of deliveries, on which permissions depend."""
    forms = {each.long_acks for each in facts.servers} - {None}
    if len(forms) > 1:
        names = ", ".join(each.name for each in facts.servers if each.long_acks)
        yield Finding("note", "replies", f"js_ack_fc_v2 is on in {names} and off in other servers")
    elif forms:
        form = "on ($JS.FC.DOMAIN.ACCOUNT.STREAM)" if True in forms else "off ($JS.FC.STREAM)"
        yield Finding("ok", "replies", f"js_ack_fc_v2 is {form}")


def clocks(facts: Facts) -> Iterator[Finding]:
    """The clocks of servers beside this machine's, those of processes beside their server's."""
    wrong = 0
    for each in facts.servers:
        if abs(each.ahead_s) > SKEW_S:
            wrong += 1
            text = f"its clock is {_skew(each.ahead_s)} this machine's: leases and ages follow it"
            yield Finding("fault", each.name, text)
    for clock in facts.clocks:
        if clock.ahead_s > SKEW_S:
            wrong += 1
            text = f"its clock is {_skew(clock.ahead_s)} NATS's: keys expire by frontends' clocks"
            yield Finding("fault", clock.process, text)
        elif clock.ahead_s < -LATE_S:
            wrong += 1
            text = f"its clock is {_skew(clock.ahead_s)} NATS's, or an outage delayed its messages"
            yield Finding("note", clock.process, text)
    if facts.servers and not wrong:
        processes = f", {len(facts.clocks)} processes" if facts.clocks else ""
        yield Finding("ok", "clocks", f"those of NATS{processes} and this machine agree")


def _use(use: UsedLimit) -> str:
    used, limit = (size(use.used), size(use.limit)) if use.is_bytes else (use.used, use.limit)
    return f"{use.setting} {used} of {limit}, {use.share:.0%}"


def _skew(ahead_s: float) -> str:
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"


def _some(names: list[str]) -> str:
    """The first names, and the number of the others."""
    first = ", ".join(names[:3])
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else first


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("-")[0].split(".")[:2] if part.isdigit())
