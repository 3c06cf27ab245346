"""Checks of `kvmesh doctor` of NATS, over facts made up."""

from typing import Any

import pytest
from nats.js.api import ClusterInfo, PeerInfo, StreamConfig, StreamInfo, StreamState

from kvmesh.cli.doctor.checks import CHECKS, diagnose
from kvmesh.cli.doctor.facts import Clock, Facts, NatsServer, UsedLimit

SERVERS = [NatsServer(name=f"n{n}", version="2.15.1", ahead_s=0.0, long_acks=False) for n in "012"]
KV = "kvm-m-kv"


def stream(name: str = KV, replicas: int = 1, **peers: dict[str, Any]) -> StreamInfo:
    found = [PeerInfo(name=peer, **state) for peer, state in peers.items()]
    state = StreamState(messages=0, bytes=0, first_seq=0, last_seq=0, consumer_count=0)
    config = StreamConfig(name=name, num_replicas=replicas)
    return StreamInfo(config=config, state=state, cluster=ClusterInfo(leader="n0", replicas=found))


def facts(**fields: Any) -> Facts:
    given = {"server": "a:4222", "version": "2.15.1", "streams": {KV: stream()}, **fields}
    given.setdefault("all_servers", len(fields.get("servers", [])) > 1)
    return Facts("m", **given)


def lines(*checks: str, **fields: Any) -> list[str]:
    found = diagnose(facts(**fields))
    return [f"{f.severity} {f.subject}: {f.text}" for f in found if f.check in checks]


def test_sound_servers_have_no_faults() -> None:
    streams = {KV: stream(replicas=3, n1={"current": True}, n2={"current": True})}
    found = diagnose(facts(servers=SERVERS, clustered=True, replicas=3, streams=streams, lost=[]))
    assert {finding.severity for finding in found} == {"ok"}
    assert {finding.check for finding in found} <= set(CHECKS)


def test_questions_with_one_cause_are_one_finding() -> None:
    unanswered = {"streams": "no answer within 4 s", "the account": "no answer within 4 s"}
    refused = ["clocks", "subject mappings"]
    assert lines("answers", unanswered=unanswered, refused=refused, clustered=True) == [
        "fault nats: streams, the account: no answer within 4 s; if fewer than half of the"
        " cluster's servers are connected, it has no leader",
        "note nats: not checked: clocks; this user may not, an operator may",
        "note nats: not checked: subject mappings; only a user without permissions may probe for"
        " them",
    ]


@pytest.mark.parametrize(
    ("version", "faults"), [("2.11.11", 1), ("2.9.10", 1), ("2.12.0", 0), ("2.16.0-beta.1", 0)]
)
def test_old_servers_are_faults(version: str, faults: int) -> None:
    assert len(lines("version", version=version)) == faults
    old = NatsServer(name="n3", version=version, ahead_s=0.0)
    found = lines("version", servers=[*SERVERS, old])
    assert sum(line.startswith("fault") for line in found) == faults
    assert any("several versions" in line for line in found)


def test_missing_and_silent_streams_are_named_with_the_effect() -> None:
    found = lines("streams", absent=["kvm-m-seq"], leaderless={"kvm-m-route": "timed out"})
    assert found == [
        "fault kvm-m-seq: this stream is missing: routers do not know each other's requests",
        "fault streams: no answer about kvm-m-route: timed out",
    ]


def test_a_mesh_that_is_elsewhere_is_told_apart_from_a_broken_one() -> None:
    (line,) = lines("streams", streams={}, absent=[KV], others=["prod"], domain="leaf")
    assert line.startswith(
        "fault mesh: no mesh is named m: this account has meshes named prod (set"
    )
    assert "the JetStream domain leaf, and a mesh in another domain" in line


def test_replicas_are_compared_with_servers_and_settings() -> None:
    one, three = {KV: stream()}, {KV: stream(replicas=3)}
    assert "in no cluster" in lines("replicas", replicas=3, streams=three)[0]
    assert "its loss stops the mesh" in lines("replicas", clustered=True, streams=one)[0]
    found = lines("replicas", clustered=True, replicas=3, servers=SERVERS[:2], streams=three)
    assert found == [
        "fault replicas: nats.replicas is 3, servers that reply: 2: streams cannot be created"
    ]
    assert lines("replicas", streams=one) == []
    assert lines("replicas", clustered=True, replicas=3, servers=SERVERS, streams=three) == []
    assert lines("replicas", clustered=True, replicas=1, streams=three) == [
        "note replicas: kvm-m-kv with another number of replicas than nats.replicas of this"
        " command, 1"
    ]


def test_peers_are_summed_up_by_server() -> None:
    names = [f"kvm-m-{n}" for n in range(5)]
    away, late = {"current": False, "offline": True}, {"current": False}
    streams = {name: stream(name, 3, n1=away, n2=late) for name in names}
    assert lines("peers", servers=SERVERS, clustered=True, streams=streams) == [
        "fault n1: this server is offline for kvm-m-0, kvm-m-1, kvm-m-2 and 2 more",
        "fault n2: this server is behind in kvm-m-0, kvm-m-1, kvm-m-2 and 2 more",
    ]
    silent = lines("peers", servers=SERVERS[:2], clustered=True, streams=streams)
    assert "n2: this server is offline" in silent[1]
    leaderless = stream()
    leaderless.cluster = ClusterInfo()
    (line,) = lines("peers", clustered=True, streams={KV: leaderless})
    assert "has no leader" in line


def test_limits_that_are_near_are_named_with_their_shares() -> None:
    near, far = UsedLimit("max_storage", 9 << 30, 10 << 30, True), UsedLimit("max_streams", 3, 100)
    assert lines("limits", uses=[near, far]) == [
        "note limits: near its limit: max_storage 9.0 GiB of 10.0 GiB, 90%"
    ]
    assert lines("limits", uses=[far]) == ["ok limits: nearest: max_streams 3 of 100, 3%"]
    assert lines("limits", uses=[UsedLimit("max_streams", 5, 5)])[0].startswith("fault")
    assert "long prompts are refused" in lines("limits", max_payload=2 << 20)[0]


def test_a_mapping_is_suspected_where_probes_are_lost() -> None:
    assert lines("mappings") == []
    assert lines("mappings", lost=[]) == [
        "ok mappings: messages arrive on the subjects of the mesh's requests"
    ]
    assert "kvm.m.work.> do not arrive" in lines("mappings", lost=["kvm.m.work.>"])[0]


def test_the_layout_of_replies_is_told() -> None:
    on = [NatsServer(name="n9", version="2.15.1", ahead_s=0.0, long_acks=True)]
    assert "on ($JS.FC.DOMAIN" in lines("replies", servers=on)[0]
    assert lines("replies", servers=SERVERS)[0] == "ok replies: js_ack_fc_v2 is off ($JS.FC.STREAM)"
    assert "n9 and off in other servers" in lines("replies", servers=[*SERVERS, *on])[0]
    assert lines("replies") == []


def test_clocks_that_differ_are_named() -> None:
    ahead = NatsServer(name="n9", version="2.15.1", ahead_s=5.0)
    found = lines("clocks", servers=[ahead], clocks=[Clock("w", 3.0), Clock("f", -20.0)])
    assert found == [
        "fault n9: its clock is 5.0 s ahead of this machine's: leases and ages follow it",
        "fault w: its clock is 3.0 s ahead of NATS's: keys expire by frontends' clocks",
        "note f: its clock is 20.0 s behind NATS's, or an outage delayed its messages",
    ]
