"""JetStream in memory: its JSON API, streams, and push consumers without acknowledgement."""

import base64
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from support.simulation.clock import EPOCH
from support.simulation.network import Headers, Network, matches

API = "$JS.API."
WINDOW = 64  # messages that a consumer sends before it waits for a flow-control reply
SWEEP_S = 0.25
NOT_FOUND = {"code": 404, "err_code": 10059, "description": "stream not found"}
NO_MESSAGE = {"code": 404, "err_code": 10037, "description": "no message found"}
NO_CONSUMER = {"code": 404, "err_code": 10014, "description": "consumer not found"}
EXISTS = {"code": 400, "err_code": 10058, "description": "stream name already in use"}
WRONG_LAST = {"code": 400, "err_code": 10071, "description": "wrong last sequence"}
Answer = dict[str, Any]
LIMITS = (
    *("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending"),
    *("memory_max_stream_bytes", "storage_max_stream_bytes", "max_bytes_required"),
)
TOTALS = ("memory", "storage", "streams", "consumers")
ACCOUNT = {
    **dict.fromkeys(TOTALS, 0),
    "limits": dict.fromkeys(LIMITS, -1),
    "api": {"level": 2, "total": 0, "errors": 0},
}


def iso(time: float) -> str:
    return datetime.fromtimestamp(EPOCH + time, UTC).isoformat().replace("+00:00", "Z")


@dataclass
class Message:
    subject: str
    data: bytes
    headers: Headers | None
    time: float


@dataclass
class Consumer:
    """The messages that a consumer has to send, and its progress."""

    name: str
    deliver: str
    filter: str
    pending: deque[int]
    sent: int = 0
    unanswered: int = 0
    stalled: str = ""
    last_sent: float = 0.0  # time of its last message
    last_subscribed: float = 0.0  # time of its last subscriber
    threshold: float = 30.0


@dataclass
class Stream:
    config: dict[str, Any]
    created: float
    messages: dict[int, Message] = field(default_factory=dict)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    replaced: dict[str, Message] = field(default_factory=dict)
    last: int = 0

    @property
    def first(self) -> int:
        return next(iter(self.messages), self.last + 1)

    @property
    def memory(self) -> bool:
        return self.config.get("storage") == "memory"

    def last_of(self, subject: str) -> int | None:
        found = (s for s in reversed(self.messages) if self.messages[s].subject == subject)
        return next(found, None)

    def info(self, subjects_filter: str | None) -> Answer:
        subjects: dict[str, int] = {}
        for message in self.messages.values() if subjects_filter else ():
            if matches(subjects_filter or "", message.subject):
                subjects[message.subject] = subjects.get(message.subject, 0) + 1
        state = {
            "messages": len(self.messages),
            "bytes": sum(len(m.data) for m in self.messages.values()),
            "first_seq": self.first,
            "last_seq": self.last,
            "consumer_count": len(self.consumers),
            "subjects": subjects,
        }
        return {"config": self.config, "created": iso(self.created), "state": state}


class JetStream:
    """Serves the API, stores the messages of its streams, and sends them to their consumers."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._loop = network.loop
        self._faults = network.faults
        self._consumers_made = 0
        self.streams: dict[str, Stream] = {}
        network.serve = self._serve
        network.later(SWEEP_S, self._sweep)

    # --- messages

    def _serve(self, subject: str, data: bytes, reply: str, headers: Headers | None) -> bool:
        if subject.startswith(API):
            self._answer(reply, self._api(subject.removeprefix(API), data))
            return True
        if subject.startswith("$JS.FC."):
            self._on_flow(subject)
            return True
        for stream in self.streams.values():
            if any(matches(pattern, subject) for pattern in stream.config["subjects"]):
                self._publish(stream, subject, data, reply, headers)
                return True
        return False

    def _publish(
        self, stream: Stream, subject: str, data: bytes, reply: str, headers: Headers | None
    ) -> None:
        expected = (headers or {}).get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None and int(expected) != (stream.last_of(subject) or 0):
            self._answer(reply, {"error": WRONG_LAST})
            return
        self.store(stream, subject, data, headers)
        if not self._faults.strikes("lost_ack"):
            self._answer(reply, {"stream": stream.config["name"], "seq": stream.last})

    def store(self, stream: Stream, subject: str, data: bytes, headers: Headers | None) -> None:
        """Add a message and send it to its consumers."""
        if (headers or {}).get("Nats-Rollup") == "sub":
            self._remove(stream, lambda s: stream.messages[s].subject == subject)
        most = stream.config.get("max_msgs_per_subject", -1)
        if most == 1 and (old := stream.last_of(subject)) is not None:
            stream.replaced[subject] = stream.messages.pop(old)
        stream.last += 1
        stream.messages[stream.last] = Message(subject, data, headers, self._loop.now)
        for consumer in stream.consumers.values():
            if matches(consumer.filter, subject):
                consumer.pending.append(stream.last)
                self._feed(stream, consumer)

    def _remove(self, stream: Stream, chosen: Callable[[int], bool]) -> None:
        for seq in [s for s in stream.messages if chosen(s)]:
            del stream.messages[seq]

    def _answer(self, reply: str, answer: Answer) -> None:
        if reply:
            self._network.route(reply, json.dumps(answer).encode(), "", None)

    # --- the API

    def _api(self, name: str, data: bytes) -> Answer:
        if name == "INFO":
            return ACCOUNT
        kind, verb, rest = name.split(".", 2)
        request = json.loads(data) if data else {}
        if (kind, verb) == ("STREAM", "CREATE"):
            return self._create(rest, request)
        if (kind, verb) == ("STREAM", "MSG"):
            verb, rest = rest.split(".", 1)
        stream_name, _, of = rest.partition(".")
        stream = self.streams.get(stream_name)
        if stream is None:
            return {"error": NOT_FOUND}
        call: Callable[[Stream, Answer, str], Answer] = getattr(
            self, f"_{kind.lower()}_{verb.lower()}"
        )
        return call(stream, request, of)

    def _create(self, name: str, config: Answer) -> Answer:
        stream = self.streams.get(name)
        if stream is None:
            stream = self.streams[name] = Stream(config, self._loop.now)
        elif stream.config != config:
            return {"error": EXISTS}
        return stream.info(None)

    def _stream_update(self, stream: Stream, request: Answer, _: str) -> Answer:
        stream.config = request
        return stream.info(None)

    def _stream_info(self, stream: Stream, request: Answer, _: str) -> Answer:
        return stream.info(request.get("subjects_filter"))

    def _stream_delete(self, stream: Stream, _: Answer, __: str) -> Answer:
        del self.streams[stream.config["name"]]
        return {"success": True}

    def _stream_purge(self, stream: Stream, request: Answer, _: str) -> Answer:
        below, subject = request.get("seq", stream.last + 1), request.get("filter", ">")
        self._remove(stream, lambda s: s < below and matches(subject, stream.messages[s].subject))
        return {"success": True, "purged": 0}

    def _stream_get(self, stream: Stream, request: Answer, _: str) -> Answer:
        subject = request.get("last_by_subj")
        seq = request.get("seq") if subject is None else stream.last_of(subject)
        message = stream.messages.get(seq or 0)
        if subject is not None and self._faults.strikes("stale"):
            message = stream.replaced.get(subject)
        if message is None:
            return {"error": NO_MESSAGE}
        answer = {
            "subject": message.subject,
            "seq": seq,
            "data": base64.b64encode(message.data).decode(),
            "time": iso(message.time),
        }
        if message.headers:
            lines = "".join(f"{k}: {v}\r\n" for k, v in message.headers.items())
            answer["hdrs"] = base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
        return {"message": answer}

    def _consumer_create(self, stream: Stream, request: Answer, of: str) -> Answer:
        config = request["config"]
        name = config.get("name") or of.partition(".")[0]
        if not name:
            self._consumers_made += 1
            name = f"c{self._consumers_made}"
        pattern = config.get("filter_subject") or ">"
        consumer = Consumer(
            name,
            config["deliver_subject"],
            pattern,
            deque(self._start(stream, config, pattern)),
            last_sent=self._loop.now,
            last_subscribed=self._loop.now,
            threshold=config.get("inactive_threshold", 30e9) / 1e9,
        )
        stream.consumers[name] = consumer
        pending = len(consumer.pending)
        self._network.later(0.0, self._feed, stream, consumer)
        return {
            "stream_name": stream.config["name"],
            "name": name,
            "config": config,
            "created": iso(self._loop.now),
            "num_pending": pending,
        }

    def _start(self, stream: Stream, config: Answer, pattern: str) -> list[int]:
        policy = config.get("deliver_policy", "all")
        if policy == "new":
            return []
        chosen = [s for s, m in stream.messages.items() if matches(pattern, m.subject)]
        if policy == "by_start_sequence":
            return [s for s in chosen if s >= config["opt_start_seq"]]
        if policy == "by_start_time":
            since = datetime.fromisoformat(config["opt_start_time"]).timestamp() - EPOCH
            return [s for s in chosen if stream.messages[s].time >= since]
        if policy == "last_per_subject":
            return sorted({stream.messages[s].subject: s for s in chosen}.values())
        return chosen

    def _consumer_delete(self, stream: Stream, _: Answer, name: str) -> Answer:
        if stream.consumers.pop(name, None) is None:
            return {"error": NO_CONSUMER}
        return {"success": True}

    def _consumer_info(self, stream: Stream, _: Answer, name: str) -> Answer:
        consumer = stream.consumers.get(name)
        if consumer is None:
            return {"error": NO_CONSUMER}
        return {"stream_name": stream.config["name"], "name": name, "num_pending": 0}

    # --- consumers

    def _feed(self, stream: Stream, consumer: Consumer) -> None:
        if stream.consumers.get(consumer.name) is not consumer:
            return
        while consumer.pending and not consumer.stalled:
            seq = consumer.pending.popleft()
            message = stream.messages.get(seq)
            if message is not None:
                self._send(stream, consumer, seq, message)

    def _send(self, stream: Stream, consumer: Consumer, seq: int, message: Message) -> None:
        consumer.sent += 1
        consumer.last_sent = self._loop.now
        stamp, pending = round((EPOCH + message.time) * 1e9), len(consumer.pending)
        of = f"{stream.config['name']}.{consumer.name}"
        reply = f"$JS.ACK.{of}.1.{seq}.{consumer.sent}.{stamp}.{pending}"
        self._deliver(consumer, message.subject, message.data, reply, message.headers)
        consumer.unanswered += 1
        if consumer.unanswered >= WINDOW:
            consumer.stalled = f"$JS.FC.{of}.{consumer.sent}"
            self._deliver(consumer, consumer.deliver, b"", consumer.stalled, {"Status": "100"})

    def _deliver(
        self, consumer: Consumer, subject: str, data: bytes, reply: str, headers: Headers | None
    ) -> None:
        """Send a message to the subscribers of the consumer's subject, under its own subject."""
        for subscription in self._network.listeners(consumer.deliver):
            subscription.client.deliver(subscription, subject, data, reply, headers)

    def _on_flow(self, subject: str) -> None:
        _, _, stream_name, name, _ = subject.split(".")
        stream = self.streams.get(stream_name)
        consumer = stream.consumers.get(name) if stream else None
        if stream is not None and consumer is not None and consumer.stalled == subject:
            consumer.stalled, consumer.unanswered = "", 0
            self._feed(stream, consumer)

    # --- time

    def _sweep(self) -> None:
        self._network.later(SWEEP_S, self._sweep)
        for stream in list(self.streams.values()):
            self._expire(stream)
            for consumer in list(stream.consumers.values()):
                if self._network.listeners(consumer.deliver):
                    consumer.last_subscribed = self._loop.now
                elif self._loop.now - consumer.last_subscribed > consumer.threshold:
                    del stream.consumers[consumer.name]
                if self._loop.now - consumer.last_sent >= 1.0:
                    self._send_heartbeat(consumer)

    def _send_heartbeat(self, consumer: Consumer) -> None:
        consumer.last_sent = self._loop.now
        headers = {"Status": "100", "Nats-Last-Consumer": str(consumer.sent)}
        if consumer.stalled:
            headers["Nats-Consumer-Stalled"] = consumer.stalled
        self._deliver(consumer, consumer.deliver, b"", "", headers)

    def _expire(self, stream: Stream) -> None:
        """Expire leases: the bucket publishes a marker for each."""
        most = stream.config.get("max_age", 0) / 1e9
        if not most:
            return
        for seq, message in list(stream.messages.items()):
            if self._loop.now - message.time <= most:
                break
            if (message.headers or {}).get("Nats-TTL") == "never":
                continue
            del stream.messages[seq]
            has_marker = stream.config.get("subject_delete_marker_ttl") and message.data
            if has_marker and stream.last_of(message.subject) is None:
                self.store(stream, message.subject, b"", {"Nats-Marker-Reason": "MaxAge"})

    # --- administration and crashes

    def purge_half(self, stream: Stream) -> None:
        """Purge the older half of a stream's messages."""
        middle = (stream.first + stream.last) // 2
        self._remove(stream, lambda seq: seq <= middle)

    def restart(self, forgotten: int = 0) -> None:
        """Clear the streams in memory, and drop the last `forgotten` messages of each file."""
        for name, stream in list(self.streams.items()):
            stream.consumers.clear()
            if stream.memory:
                del self.streams[name]
                continue
            for seq in list(stream.messages)[-forgotten:] if forgotten else []:
                del stream.messages[seq]
                stream.last = seq - 1
        for client in list(self._network.clients):
            client.cut()
