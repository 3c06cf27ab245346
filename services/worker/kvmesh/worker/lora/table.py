"""The adapters that an engine has loaded, and the state of each; pure, no I/O."""

from collections import OrderedDict
from collections.abc import Container
from enum import Enum

from kvmesh.bus.messages import adapter_name
from kvmesh.worker.lora.folder import AdapterError, NoRoom

MAX_YIELDED = 256  # remembered, for requests that come late


class State(Enum):
    """State of a loaded adapter: a card lists those that are served or replaced.

    A replaced adapter still gets the requests that were prepared before its replacement. A yielding
    one, which makes room, gets those that are on their way. A leaving one finishes its requests.
    """

    SERVED = 0
    REPLACED = 1
    YIELDING = 2
    LEAVING = 3


class AdapterTable:
    """Loaded adapters by identity; at most one of each name is served.

    At most `limit` are served and one more is loaded, so that any one of them can be replaced.
    """

    def __init__(self, identities: list[str], limit: int) -> None:
        self._states = dict.fromkeys(identities, State.SERVED)
        self._first = frozenset(identities)
        self._pinned = set(identities)
        self._used_at: dict[str, float] = {}
        self._yielded: OrderedDict[str, None] = OrderedDict()
        self.limit = limit

    @property
    def listed(self) -> list[str]:
        """The identities for a card, served ones first."""
        ordered = sorted(self._states.items(), key=lambda item: item[1].value)
        return [identity for identity, state in ordered if state.value < State.YIELDING.value]

    @property
    def admitted(self) -> list[str]:
        """The identities whose requests are accepted."""
        yielding = [i for i, state in self._states.items() if state is State.YIELDING]
        return self.listed + yielding

    @property
    def removable(self) -> list[str]:
        """The served adapters that may be unloaded for others."""
        served = [i for i, state in self._states.items() if state is State.SERVED]
        return [identity for identity in served if identity not in self._pinned]

    @property
    def leaving(self) -> list[str]:
        """The adapters that are off the card, and not yet out of the engine."""
        return [i for i, state in self._states.items() if state is State.LEAVING]

    @property
    def added(self) -> list[str]:
        """The adapters that were loaded since, in any state."""
        return [identity for identity in self._states if identity not in self._first]

    def pin(self, identity: str) -> None:
        """Keep an adapter loaded until it is withdrawn."""
        self._pinned.add(identity)

    def used(self, identity: str, now: float) -> None:
        """A request uses an adapter, if it is loaded."""
        if identity in self._states:
            self._used_at[identity] = now

    def has_yielded(self, identity: str) -> bool:
        """True if an adapter was unloaded of late to make room."""
        return identity in self._yielded

    def is_full(self, identity: str) -> bool:
        """True if an adapter has to wait until another one is unloaded."""
        return identity not in self._states and self._would_exceed(identity)

    def least_used(self, now: float, idle_s: float, busy: Container[str] = ()) -> str:
        """The adapter that makes room: not `busy`, not used for `idle_s` seconds, and for longest.

        Raises NoRoom.
        """
        removable = self.removable
        if not removable:
            reason = "all are pinned" if self._states else "it loads none"
            raise NoRoom(f"{self.limit} adapters fit, and {reason}")
        removable = [identity for identity in removable if identity not in busy]
        if not removable:
            raise NoRoom(f"{self.limit} adapters fit, and requests use all that may leave")
        found = min(removable, key=lambda identity: self._used_at.get(identity, 0.0))
        idle = now - self._used_at.get(found, 0.0)
        if idle < idle_s:
            raise NoRoom(f"all {self.limit} adapters were used within {idle_s:g} s")
        return found

    def yields(self, identity: str) -> None:
        """Take an adapter off the card to make room for another one."""
        self._states[identity] = State.YIELDING

    def state(self, identity: str) -> State | None:
        """The state of an adapter; None if it is not loaded."""
        return self._states.get(identity)

    def served(self, name: str) -> str:
        """The identity served under a name; raises AdapterError if there is none."""
        for identity, state in self._states.items():
            if state is State.SERVED and adapter_name(identity) == name:
                return identity
        raise AdapterError(f"there is no adapter {name}")

    def serves(self, name: str) -> bool:
        """True if some adapter is served under a name."""
        return name in self._served_names

    def other_served(self, identity: str) -> bool:
        """True if another content is served under the name of an adapter."""
        served = self._states.get(identity) is State.SERVED
        return not served and self.serves(adapter_name(identity))

    def can_load(self, identity: str) -> bool:
        """True if an adapter fits now, False if it will once a replaced one has left.

        Raises AdapterError if it does not fit in addition to those served.
        """
        if identity in self._states:
            return True
        if self._would_exceed(identity):
            raise NoRoom(
                f"{len(self._served_names)} adapters are loaded, as many as worker.max_adapters"
                " allows: unload one first"
            )
        return len(self._states) <= self.limit

    @property
    def _served_names(self) -> set[str]:
        return {adapter_name(i) for i, state in self._states.items() if state is State.SERVED}

    def _would_exceed(self, identity: str) -> bool:
        return len(self._served_names | {adapter_name(identity)}) > self.limit

    def serve(self, identity: str) -> str | None:
        """Serve an adapter that the engine has loaded; return the identity that it replaces."""
        name = adapter_name(identity)
        replaced = next(
            (
                other
                for other, state in self._states.items()
                if state is State.SERVED and other != identity and adapter_name(other) == name
            ),
            None,
        )
        if replaced is not None:
            self._states[replaced] = State.REPLACED
        self._states[identity] = State.SERVED
        self._yielded.pop(identity, None)
        return replaced

    def leave(self, identity: str) -> None:
        """Take an adapter off the card."""
        self._states[identity] = State.LEAVING

    def withdraw(self, name: str) -> str:
        """Take all adapters of a name off the card; return the served one.

        Raises AdapterError if there is none.
        """
        served = self.served(name)
        for identity in self._states:
            if adapter_name(identity) == name:
                self._states[identity] = State.LEAVING
        return served

    def remove(self, identity: str) -> None:
        """Forget an adapter that the engine has unloaded."""
        if self._states.pop(identity, None) is State.YIELDING:
            self._yielded[identity] = None
            if len(self._yielded) > MAX_YIELDED:
                self._yielded.popitem(last=False)
        self._pinned.discard(identity)
        self._used_at.pop(identity, None)
