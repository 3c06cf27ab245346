"""The planners of all models, to which this module passes the messages of the mesh; no I/O."""

import logging

import msgspec

from kvmesh.bus.messages import (
    Instance,
    Load,
    MessageDecoder,
    Role,
    RouteEvent,
    SeqBatch,
    Starting,
    Wake,
    WorkerState,
)
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.bus.subjects import untoken
from kvmesh.planner.config import check_same_pools, options_of, pools_of
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pools import Pool, pool_of
from kvmesh.runtime.warnings import Warnings

log = logging.getLogger(__name__)
_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
_sequences = MessageDecoder(SeqBatch)


class ModelPlanners:
    """The planner of each model, by the model's name, and the cards of the workers.

    Times are in Unix seconds. A model that no pool serves is a warning and has no planner.
    """

    def __init__(self, options: PlanOptions, pools: list[Pool], warnings: Warnings) -> None:
        self._options = options
        self._pools = pools
        self._warnings = warnings
        self._unplanned: dict[str, str] = {}
        self._cards: dict[str, Instance] = {}
        self._by_name: dict[str, str] = {}  # name: its latest instance
        self.cores: dict[str, PlannerCore] = {}

    def core(self, model: str) -> PlannerCore | None:
        """The planner of a model; None if no pool serves it, or another model has its pools."""
        core = self.cores.get(model)
        if core is not None:
            return core
        pools = pools_of(self._pools, model)
        taken = {view.pool.name for other in self.cores.values() for view in other.pools}
        reason = ""
        if not pools:
            reason = f"no pool of the planner serves {model}"
        elif shared := sorted(taken & {pool.name for pool in pools}):
            reason = (
                f"{model} is not planned, since pool {shared[0]} serves another model: give each"
                " model pools of its own (model=…)"
            )
        if reason:
            if self._unplanned.get(model) != reason:
                self._unplanned[model] = reason
                self._warnings.update("unplanned_model", self._unplanned)
            return None
        core = self.cores[model] = PlannerCore(options_of(self._options, model), pools)
        return core

    def card(self, model: str) -> Instance | None:
        """The card of one of a model's workers."""
        cards = self._cards.values()
        return next((card for card in cards if card.model and card.model.name == model), None)

    def name(self, instance: str) -> str:
        """The name of a worker; empty if it has left."""
        card = self._cards.get(instance)
        return card.name if card is not None else ""

    def latest(self, name: str) -> Instance | None:
        """The card of the latest worker of a name; None if there is none."""
        return self._cards.get(self._by_name.get(name, ""))

    def replace_options(self, options: PlanOptions, pools: list[Pool]) -> None:
        """Use other options and sizes of the same pools; raises PlannerConfigError for others."""
        check_same_pools(self._pools, pools)
        self._options, self._pools = options, pools
        for model, core in self.cores.items():
            core.replace_options(options_of(options, model), {pool.name: pool for pool in pools})

    # messages

    def on_worker(self, card: Instance, state: WorkerState, now: float) -> None:
        """A worker has come into a state, or its card has changed; other roles are ignored."""
        if state is WorkerState.GONE:
            self._left(card)
        elif card.role is Role.PARKED or (card.role is Role.WORKER and card.model is not None):
            self._joined(card, now)

    def _joined(self, card: Instance, now: float) -> None:
        known = self._cards.get(card.instance)
        new = known is None or known.role is not card.role
        self._cards[card.instance] = card
        if new:
            self._by_name[card.name] = card.instance
        pool = pool_of(card, self._pools)
        core = self.core(card.model.name if card.model is not None else card.parked_for)
        if core is not None and pool in [view.pool for view in core.pools]:
            assert pool is not None
            core.joined(card, pool.name, now, new)
            return
        if new and card.role is Role.WORKER:
            log.warning("worker %s belongs to no pool: the planner leaves it alone", card.name)
        for other in self.cores.values():
            other.left(card.instance)

    def _left(self, card: Instance) -> None:
        """A worker has left, or its state is to change."""
        known = self._cards.get(card.instance)
        if known is None or known.role is not card.role:
            return
        del self._cards[card.instance]
        if self._by_name.get(card.name) == card.instance:
            del self._by_name[card.name]
        for core in self.cores.values():
            core.left(card.instance)

    def on_load(self, load: Load) -> None:
        for core in self.cores.values():
            core.on_load(load)

    def on_starting(self, starting: Starting, now: float) -> None:
        """A worker reports that it starts."""
        core = self.cores.get(starting.model)
        if core is not None:
            core.reported.heard(starting.instance, now)

    def on_route(self, message: StreamMessage, now: float) -> None:
        """A decision or an outcome from the stream."""
        try:
            event = _routes.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored a malformed decision at %d: %s", message.seq, error)
            return
        core = self.core(_model(message))
        if core is not None:
            core.on_route(event, message.time or now)

    def on_sequences(self, message: StreamMessage) -> None:
        """Events of active sequences from the stream."""
        try:
            batch = _sequences.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored malformed active sequences at %d: %s", message.seq, error)
            return
        core = self.cores.get(_model(message))
        if core is not None:
            for event in batch.events:
                core.on_sequence(event)

    def on_wake(self, wake: Wake, now: float) -> None:
        """Requests wait in a frontend for a model without workers."""
        core = self.core(wake.model)
        if core is not None:
            core.wake(wake.waiting, now)


def _model(message: StreamMessage) -> str:
    return untoken(message.subject.rpartition(".")[2])
