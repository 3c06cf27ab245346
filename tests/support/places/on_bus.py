"""A scripted operator on a real bus, for the connectors `bucket` and `processes`."""

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import DesiredFleet, FleetReport, MessageDecoder
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.planner.connectors.bucket import BucketConnector
from kvmesh.planner.core.pools import Pool
from support.places.place import POOLS, TIMEOUT_S

_desired = MessageDecoder(DesiredFleet)


class BusPlace:
    """Acknowledges every wanted fleet, with `error` if one is set, unless it is cut off."""

    silence = "no operator has"
    cut_timeout_s = 0.5

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.pools = [Pool(name) for name in POOLS]
        self.error = ""
        self.changes = 0
        self.report = FleetReport(revision=0, pools={}, workers={})
        self._names = {pool: [f"{pool}-{n}" for n in range(k)] for pool, k in POOLS.items()}
        self._reader: StreamReader | None = None

    def connector(self, timeout_s: float = TIMEOUT_S) -> BucketConnector:
        return BucketConnector(self.bus, timeout_s, "planner-1")

    async def start(self) -> None:
        subjects = self.bus.subjects
        stream, key = f"KV_{subjects.plan_bucket}", subjects.desired_key
        subject = f"$KV.{subjects.plan_bucket}.{key}"
        self._reader = StreamReader(
            self.bus, stream, subject, self._receive, Start(last_per_subject=True)
        )
        await self._reader.open()
        self._write(0)
        await self.bus.flush()

    def _receive(self, message: StreamMessage) -> None:
        if not message.data:  # deleted
            return
        wanted = _desired.decode(message.data)
        self.changes += 1
        for pool, number in wanted.pools.items():
            self._resize(pool, number, wanted.stop)
        self._write(wanted.revision)

    def _resize(self, pool: str, number: int, stop: list[str]) -> None:
        names = self._names[pool]
        for name in [n for n in stop if n in names][: max(0, len(names) - number)]:
            names.remove(name)
        del names[number:]
        free = (f"{pool}-{n}" for n in range(1000) if f"{pool}-{n}" not in names)
        names += [next(free) for _ in range(number - len(names))]

    def _write(self, revision: int) -> None:
        self.report = FleetReport(
            revision=revision,
            pools={pool: len(names) for pool, names in self._names.items()},
            error=self.error,
            workers={pool: list(names) for pool, names in self._names.items()},
        )
        subjects = self.bus.subjects
        key = f"$KV.{subjects.plan_bucket}.{subjects.report_key}"
        self.bus.post(key, self.report)

    async def running(self, pool: str) -> list[str]:
        return list(self._names[pool])

    async def set(self, pool: str, number: int) -> None:
        self._resize(pool, number, [])
        self._write(self.report.revision)
        await self.bus.flush()

    async def cut(self) -> None:
        await self.close()
        bucket = await self.bus.js.key_value(self.bus.subjects.plan_bucket)
        await bucket.delete(self.bus.subjects.report_key)

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()
            self._reader = None
