"""The nodes of a simulation, and the attachments of their workers."""

from kvmesh.bus.messages import KvEvent, ReturnForecast
from kvmesh.simulator.index import SimulatedIndex
from kvmesh.simulator.nodes.attachment import SimulatedAttachment, SteppingWorker
from kvmesh.simulator.nodes.node import SimulatedNode
from kvmesh.simulator.nodes.options import NodeOptions
from kvmesh.simulator.nodes.sources import SimulatedSources
from kvmesh.simulator.virtual_clock import VirtualClock


class SimulatedNodes:
    """Nodes with a kvbm each; their events go to `index`."""

    def __init__(
        self,
        model: str,
        clock: VirtualClock,
        index: SimulatedIndex,
        options: NodeOptions,
        block_size: int,
    ) -> None:
        self._model = model
        self._index = index
        sources = SimulatedSources(clock, options, index.find)
        self.nodes = [
            SimulatedNode(number, model, clock, options, block_size, sources, self._publish)
            for number in range(options.count)
        ]
        sources.nodes = {node.instance: node for node in self.nodes}
        self._attachments: dict[str, SimulatedAttachment] = {}

    def of_worker(self, number: int) -> SimulatedNode:
        return self.nodes[number % len(self.nodes)]

    def attach(self, worker: SteppingWorker, number: int) -> SimulatedAttachment:
        """Attach a worker to its node."""
        attachment = SimulatedAttachment(self.of_worker(number), worker, self._model)
        self._attachments[worker.instance] = attachment
        return attachment

    def detach(self, instance: str) -> None:
        """Detach a worker that is gone."""
        self._attachments.pop(instance).close()

    def expect_returns(self, instance: str, forecasts: list[ReturnForecast]) -> None:
        """Pass forecasts to the kvbm that a router sent them to."""
        for node in self.nodes:
            if node.instance == instance:
                node.expect_returns(forecasts)

    def release(self, session: str) -> None:
        """Release a session's blocks on all nodes."""
        for node in self.nodes:
            node.release(session)

    def _publish(self, node: SimulatedNode, events: list[KvEvent]) -> None:
        self._index.publish(node, events)
