"""The connectors `bucket` and `processes`: an operator on the bus starts and stops workers.

The planner writes the wanted fleet into the plan bucket. The operator, such as `kvmesh up`, reads
it, starts and stops workers, and writes a report of what it runs: when it starts, for each wanted
fleet, and whenever its workers change.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import BusError, Conflict, NotFound, NotPermitted, cause
from kvmesh.bus.messages import DesiredFleet, FleetReport, MessageDecoder, encode
from kvmesh.planner.connectors.interface import ConnectorError, PoolState

POLL_S = 0.1
SILENT = "no operator has written a report into the plan bucket; `kvmesh up` is one"
_desired = MessageDecoder(DesiredFleet)
_reports = MessageDecoder(FleetReport)


class BucketConnector:
    """Writes the wanted fleet and waits up to `timeout_s` seconds for the operator's report.

    `planner` is the instance that signs what it writes. Several planners may write: each changes
    only the pools that it names.
    """

    chooses = True

    def __init__(self, bus: Bus, timeout_s: float, planner: str = "") -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._planner = planner

    async def open(self) -> None:
        """Wait until an operator has reported; raises ConnectorError."""
        with self._errors(lambda: SILENT):
            async with asyncio.timeout(self._timeout_s):
                bucket = await self._bucket()
                while await self._report(bucket) is None:
                    await asyncio.sleep(POLL_S)

    async def state(self) -> dict[str, PoolState]:
        """The pools of the operator's last report; raises ConnectorError if there is none."""
        with self._errors(lambda: "NATS does not reply"):
            async with asyncio.timeout(self._timeout_s):
                report = await self._report(await self._bucket())
        if report is None:
            raise ConnectorError(SILENT)
        return {
            pool: PoolState(number, tuple(report.workers.get(pool, ())))
            for pool, number in report.pools.items()
        }

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        """Write the numbers; return once the operator has acknowledged them without an error.

        Raises ConnectorError.
        """
        revision: int | None = 0
        report: FleetReport | None = None
        with self._errors(lambda: _unacknowledged(revision, report)):
            async with asyncio.timeout(self._timeout_s):
                bucket = await self._bucket()
                revision = await self._write(bucket, pools, list(stop))
                while revision is not None and (report is None or report.revision < revision):
                    await asyncio.sleep(POLL_S if report else 0)
                    report = await self._report(bucket)
        if report is not None and report.error:
            raise ConnectorError(f"the operator cannot run what is wanted: {report.error}")

    async def close(self) -> None:
        """Nothing to release: the bus belongs to the caller."""

    async def _bucket(self) -> Bucket:
        name = self._bus.subjects.plan_bucket
        try:
            return await self._bus.js.key_value(name)
        except NotFound:
            raise ConnectorError(f"the bucket {name} is missing") from None

    async def _report(self, bucket: Bucket) -> FleetReport | None:
        try:
            entry = await bucket.get(self._bus.subjects.report_key)
            return _reports.decode(entry.value or b"")
        except NotFound:
            return None
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"the operator's report cannot be decoded: {error}") from error

    async def _write(self, bucket: Bucket, pools: dict[str, int], stop: list[str]) -> int | None:
        """The revision that asks for the numbers; None if the operator runs them already."""
        key = self._bus.subjects.desired_key
        while True:
            last, present = 0, DesiredFleet(revision=0, pools={})
            with contextlib.suppress(NotFound):
                entry = await bucket.get(key)
                last = entry.revision or 0
                with contextlib.suppress(msgspec.MsgspecError):  # it is replaced
                    present = _desired.decode(entry.value or b"")
            report = await self._report(bucket)
            seen = report.revision if report is not None else 0
            if _includes(present.pools, pools):
                if seen < present.revision and present.stop == stop:
                    return present.revision
                if seen >= present.revision and report and _includes(report.pools, pools):
                    return None
            fleet = DesiredFleet(
                # above the operator's report as well, which outlives a lost wanted fleet
                revision=max(present.revision, seen) + 1,
                pools={**present.pools, **pools},
                stop=stop,
                planner=self._planner,
                time=time.time(),
            )
            try:
                if last:
                    await bucket.update(key, encode(fleet), last=last)
                else:
                    await bucket.create(key, encode(fleet))
            except Conflict:
                continue  # another planner was faster; the caller's deadline bounds the attempts
            return fleet.revision

    @contextlib.contextmanager
    def _errors(self, silence: Callable[[], str]) -> Iterator[None]:
        """Raise ConnectorError for errors of the bus, and with `silence()` after the timeout."""
        try:
            yield
        except TimeoutError:
            raise ConnectorError(f"{silence()} (waited {self._timeout_s:g} s)") from None
        except BusError as error:
            reason = f"cannot use the plan bucket: {cause(error)}"
            raise ConnectorError(reason, permanent=isinstance(error, NotPermitted)) from error


def _includes(present: Mapping[str, int], pools: Mapping[str, int]) -> bool:
    return all(present.get(pool) == number for pool, number in pools.items())


def _unacknowledged(revision: int | None, report: FleetReport | None) -> str:
    if not revision:
        return "NATS does not reply"
    if report is None:
        return f"no operator has acknowledged revision {revision}; `kvmesh up` is one"
    return (
        f"the operator has not acknowledged revision {revision};"
        f" its last report is of revision {report.revision}"
    )
