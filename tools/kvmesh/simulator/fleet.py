"""Mock engines on the virtual clock: the same core that a live mock worker steps."""

from collections.abc import Callable
from functools import partial

from kvmesh.bus.messages import Capacity, Instance, KvEvent, Load, ModelCard, Role
from kvmesh.indexer.decoding import EventSource
from kvmesh.simulator.options import WorkerOptions
from kvmesh.simulator.records import WorkerRecord
from kvmesh.simulator.virtual_clock import VirtualClock
from kvmesh.worker.enginecore.sequence import Request
from kvmesh.worker.engines.mock.core import MockCore, MockOutput, StepResult
from kvmesh.worker.engines.mock.decode_plan import DecodePlan

MODEL = "simulated"
Deliver = Callable[["SimulatedWorker", list[MockOutput]], None]
Publish = Callable[["SimulatedWorker", list[KvEvent]], None]


class Blank:
    """The text of every simulated answer: only its length matters."""

    def slice(self, start: int, stop: int) -> list[int]:
        return [0] * (stop - start)


class SimulatedWorker:
    """One engine: steps while it has work, hands over what each step did at the step's end.

    Steps that only decode are planned for up to `horizon` seconds at once, and cut short at the
    end of the step under way when a request arrives: the outcome is that of single steps.
    """

    def __init__(
        self,
        agenda: VirtualClock,
        card: Instance,
        core: MockCore,
        deliver: Deliver,
        publish: Publish,
        horizon: float,
    ) -> None:
        self.card = card
        self.instance = card.instance
        self.core = core
        self.alive = True
        self.leaving = False
        self.event_id = 0
        self.record = WorkerRecord(card.name)
        self.source = EventSource(MODEL, card.name)
        self._agenda = agenda
        self._deliver = deliver
        self._publish = publish
        self._horizon = horizon
        self._stepping = False
        self._begun = 0.0
        self._ahead: DecodePlan | None = None
        self._released: list[str] = []
        self._load: Load | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is under way: what ends with it has left the core already."""
        return self._stepping

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next step. Raises ValueError if it can never fit."""
        self._load = None
        self.core.submit(request)
        if not self._stepping:
            self._begin()
        elif self._ahead is not None:
            rest = self._ahead.until(self._agenda.now - self._begun)
            if rest.steps < self._ahead.steps:
                self._plan(rest)

    def release(self, session: str) -> None:
        """Drop what only this session uses, after the step under way."""
        self._released.append(session)
        if not self._stepping:
            self._forget()

    def progress(self) -> list[tuple[str, int]]:
        """Answers under way, and their tokens by now."""
        ahead, batch = self._ahead, self.core.scheduler.decoding
        clock = batch.clock
        if ahead is not None and batch.members:
            clock += ahead.until(self._agenda.now - self._begun).steps - 1
        return [(s.request.id, s.generated + clock - s.synced_step) for s in batch.members]

    def _begin(self) -> None:
        self._load = None
        self._stepping = self.alive and self.core.busy
        if not self._stepping:
            return
        self._begun = self._agenda.now
        result = self.core.plan(self._begun, self._horizon)
        if isinstance(result, DecodePlan):
            self._plan(result)
        else:
            self._agenda.after(result.duration, partial(self._end, result))

    def _plan(self, ahead: DecodePlan) -> None:
        self._ahead = ahead
        self._agenda.at(self._begun + ahead.duration, partial(self._take, ahead))

    def _take(self, ahead: DecodePlan) -> None:
        if self._ahead is ahead:
            self._ahead = None
            self._end(self.core.execute(ahead))

    def _end(self, result: StepResult) -> None:
        if not self.alive:
            return
        if result.events:
            self._publish(self, result.events)
        if result.outputs:
            self._deliver(self, result.outputs)
        if self._released:
            self._forget()
        self._begin()

    def _forget(self) -> None:
        self._load = None
        released, self._released = self._released, []
        if self.core.blocks.retention.release(released):
            self._publish(self, self.core.take_events())

    def load(self) -> Load:
        """The forward-pass metrics that a live worker would publish now."""
        if self._load is None:
            self._load = self.core.load(self.instance, 0)
        return self._load


def make_card(number: int, life: int, group: WorkerOptions) -> Instance:
    """The card of worker `number` in its `life`-th life."""
    options = group.core
    limits = options.limits
    name = f"worker-{number}"
    return Instance(
        instance=f"{name}.{life}",
        role=Role.WORKER,
        name=name,
        version="simulated",
        started=0.0,
        engine="mock",
        serves=group.serves,
        model=ModelCard(
            name=MODEL,
            context=0,  # groups of unlike memory serve one model
            block_size=limits.block_size,
            files="",
        ),
        capacity=Capacity(
            blocks=options.blocks,
            max_sequences=limits.max_sequences,
            max_batched_tokens=limits.max_batched_tokens,
        ),
    )
