"""The faults of a simulated mesh; each seed switches on a subset (swarm testing)."""

from dataclasses import dataclass
from random import Random

# Probability per message, or mean seconds between two faults.
RATES = {
    "loss": 0.01,  # a message on a live connection is lost
    "repeat": 0.02,  # a stream's message is delivered twice
    "lost_ack": 0.2,  # a publisher gets no acknowledgement of a stored message
    "reorder": 1.0,  # subscriptions of one connection overtake each other
    "slow": 0.05,  # a message takes up to a second and a half
    "stale": 0.3,  # a read of one message is answered with the one before it
}
PERIODS_S = {
    "reconnect": 6.0,  # a connection breaks and reconnects
    "consumer_gone": 5.0,  # a consumer of a stream vanishes silently
    "freeze": 6.0,  # a process, or the server, freezes for a while
    "kill": 8.0,  # a process dies, and another replaces it
    "restart": 15.0,  # the server restarts: streams in memory are lost
    "recreate": 15.0,  # the KV stream is deleted and created again
    "rewind": 12.0,  # the server starts with an older state of its files
    "purge": 8.0,  # the oldest messages of the KV stream are purged
    "clear": 6.0,  # a worker drops all blocks
    "skew": 0.0,  # the processes' clocks are some seconds apart
    "vanish": 3.0,  # a client dies with a request
}
ALL = (*RATES, *PERIODS_S)


@dataclass
class Faults:
    """The faults of one run, while it is not healing."""

    chosen: frozenset[str]
    random: Random
    healing: bool = False

    @classmethod
    def of(cls, random: Random) -> "Faults":
        """A random subset: some runs are nearly quiet, some have everything at once."""
        share = random.uniform(0.1, 0.9)
        return cls(frozenset(name for name in ALL if random.random() < share), random)

    def on(self, name: str) -> bool:
        return name in self.chosen and not self.healing

    def strikes(self, name: str) -> bool:
        """True if the fault applies to this message."""
        return self.on(name) and self.random.random() < RATES[name]

    def delay(self) -> float:
        """Latency in seconds of a message between a client and the server."""
        if self.strikes("slow"):
            return self.random.uniform(0.01, 1.5)
        return self.random.uniform(0.0001, 0.002)

    def interval(self, name: str) -> float:
        """Seconds until the next fault of a kind."""
        return self.random.expovariate(1 / PERIODS_S[name])
