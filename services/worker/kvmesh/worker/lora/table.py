"""The adapters that an engine has loaded, and the state of each; pure, no I/O."""

from enum import Enum

from kvmesh.bus.messages import adapter_name
from kvmesh.worker.lora.folder import AdapterError


class State(Enum):
    """State of a loaded adapter: a card lists those that are served or replaced.

    A replaced adapter still gets the requests that were prepared before its replacement. A leaving
    one finishes its requests.
    """

    SERVED = 0
    REPLACED = 1
    LEAVING = 2


class AdapterTable:
    """Loaded adapters by identity; at most one of each name is served.

    At most `limit` are served and one more is loaded, so that any one of them can be replaced.
    """

    def __init__(self, identities: list[str], limit: int) -> None:
        self._states = dict.fromkeys(identities, State.SERVED)
        self._limit = limit

    @property
    def listed(self) -> list[str]:
        """The identities for a card, served ones first."""
        ordered = sorted(self._states.items(), key=lambda item: item[1].value)
        return [identity for identity, state in ordered if state is not State.LEAVING]

    def state(self, identity: str) -> State | None:
        """The state of an adapter; None if it is not loaded."""
        return self._states.get(identity)

    def served(self, name: str) -> str:
        """The identity served under a name; raises AdapterError if there is none."""
        for identity, state in self._states.items():
            if state is State.SERVED and adapter_name(identity) == name:
                return identity
        raise AdapterError(f"there is no adapter {name}")

    def can_load(self, identity: str) -> bool:
        """True if an adapter fits now, False if it will once a replaced one has left.

        Raises AdapterError if it does not fit in addition to those served.
        """
        if identity in self._states:
            return True
        name = adapter_name(identity)
        served = {adapter_name(i) for i, state in self._states.items() if state is State.SERVED}
        if len(served | {name}) > self._limit:
            raise AdapterError(
                f"{len(served)} adapters are loaded, as many as worker.max_adapters allows:"
                " unload one first"
            )
        return len(self._states) <= self._limit

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
        self._states.pop(identity, None)
