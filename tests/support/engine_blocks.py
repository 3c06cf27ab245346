"""A plain model of `EngineBlocks` of the native core: dicts, and no care for time."""

from array import array
from collections import Counter, OrderedDict

from kvmesh.hashing import block_hashes, sequence_hashes
from kvmesh.index import TIERS

Run = tuple[int | None, bytes, bytes, int, int | None]
Moved = list[tuple[int, bytes, list[Run]]]
Placed = tuple[list[int], bool]  # names of a run; its parent was held when the run began


def packed(values: list[int]) -> bytes:
    return array("Q", values).tobytes()


class PlainEngineBlocks:
    """As `EngineBlocks`. A position: parent, sequence hash before it or salt, local, sequence."""

    def __init__(self, recent: int, counted: bool) -> None:
        self._limit = recent
        self._counted = counted
        self._positions: dict[int, tuple[int | None, int, int, int]] = {}  # of held blocks
        self._recent: OrderedDict[int, tuple[int | None, int, int, int]] = OrderedDict()
        self._copies: list[Counter[int]] = [Counter() for _ in range(TIERS)]
        self._kept = [0] * TIERS

    def held(self, tier: int) -> int:
        return len(self._copies[tier])

    def kept(self) -> list[int]:
        return list(self._kept)

    def copies(self, tier: int, name: int) -> int:
        return self._copies[tier][name]

    def position(self, name: int) -> tuple[int, int] | None:
        found = self._positions.get(name) or self._recent.get(name)
        return None if found is None else (found[1], found[3])

    def known(self, names: list[int]) -> int:
        return sum(self.position(name) is not None for name in names)

    def leading(self, sequence: bytes) -> int:
        near = {self._positions[name][3] for name in self._copies[0]}
        hashes = array("Q", sequence)
        return next((i for i, h in enumerate(hashes) if h not in near), len(hashes))

    def store(
        self,
        tier: int,
        names: list[int],
        parent: int | None,
        salt: int,
        tokens: bytes,
        extras: tuple[int, ...],
    ) -> tuple[list[Run], Moved] | None:
        if parent is not None:
            before = self.position(parent)
            if before is None:
                return None
            salt = before[1]
        local = array("Q", block_hashes(tokens, len(tokens) // len(names) // 4)[0])
        chain: list[tuple[int, tuple[int | None, int, int, int]]] = []
        for name, plain, extra in zip(names, local, extras or [0] * len(names), strict=True):
            position = after(parent, salt, plain ^ extra)
            chain.append((name, position))
            parent, salt = name, position[3]
        moved = [] if tier else self._correct(chain)
        runs: list[Placed] = []
        for name, position in chain:
            self._recent.pop(name, None)
            self._positions[name] = position
            self._add(tier, name, True, runs)
        return [self._run(run) for run in runs], moved

    def hold(self, tier: int, names: list[int], again: bool = True) -> list[Run]:
        runs: list[Placed] = []
        for name in names:
            if name in self._recent:
                self._positions[name] = self._recent.pop(name)
            self._add(tier, name, again, runs)
        return [self._run(run) for run in runs]

    def release(self, tier: int, names: list[int]) -> tuple[bytes, list[int]]:
        gone, missing = [], []
        for name in names:
            if not self._copies[tier][name]:
                del self._copies[tier][name]
                missing.append(name)
                continue
            self._copies[tier][name] -= 1
            if not self._copies[tier][name]:
                gone.append(name)
                self._lose(tier, name)
        return packed(gone), missing

    def clear(self, tier: int) -> None:
        held = self._copies[tier]
        for name in [name for name in self._positions if name in held]:
            self._lose(tier, name)

    def forget(self) -> None:
        self._recent.clear()

    def dump(self) -> list[list[Run]]:
        published: set[int] = set()
        tiers = []
        for held in self._copies:
            runs: list[Placed] = []
            for name in [name for name in self._positions if name in held]:
                self._extend(runs, name)
            tiers.append([self._attached(run, published) for run in runs])
        return tiers

    def _add(self, tier: int, name: int, again: bool, runs: list[Placed]) -> None:
        if not self._copies[tier][name]:
            self._copies[tier][name] = 1
            self._kept[tier] += 1
            self._extend(runs, name)
        elif again and self._counted:
            self._copies[tier][name] += 1

    def _lose(self, tier: int, name: int) -> None:
        del self._copies[tier][name]
        if not any(name in held for held in self._copies):
            self._recent[name] = self._positions.pop(name)
        if len(self._recent) > self._limit:
            self._recent.popitem(last=False)

    def _extend(self, runs: list[Placed], name: int) -> None:
        parent = self._positions[name][0]
        if runs and parent is not None and parent == runs[-1][0][-1]:
            runs[-1][0].append(name)
        else:
            runs.append(([name], parent in self._positions))

    def _run(self, run: Placed) -> Run:
        names, follows_held = run
        parent, previous, _, _ = self._positions[names[0]]
        engine, local = packed(names), packed([self._positions[name][2] for name in names])
        if parent is None:
            return None, engine, local, previous, None
        if follows_held:
            return parent, engine, local, 0, None
        return None, engine, local, 0, previous

    def _attached(self, run: Placed, published: set[int]) -> Run:
        """A run for a reader that knows what is published."""
        names = run[0]
        parent, engine, local, salt, previous = self._run(run)
        if parent is not None and parent not in published:
            parent, previous = None, self._positions[names[0]][1]
        published.update(names)
        return parent, engine, local, salt, previous

    def _correct(self, chain: list[tuple[int, tuple[int | None, int, int, int]]]) -> Moved:
        moved = {
            name: position
            for name, position in chain
            if name in self._positions and self._positions[name][3] != position[3]
        }
        if not moved:
            return []
        self._recent.clear()
        self._positions |= moved
        left = list(moved)
        while left:
            parent = left.pop(0)
            for name, position in list(self._positions.items()):
                if position[0] == parent and name not in moved:
                    moved[name] = after(parent, moved[parent][3], position[2])
                    self._positions[name] = moved[name]
                    left.append(name)
        published = self._positions.keys() - moved.keys()
        found: Moved = []
        for tier, held in enumerate(self._copies):
            names = [name for name in moved if name in held]
            runs: list[Placed] = []
            for name in names:
                self._extend(runs, name)
            if names:
                again = [self._attached(run, published) for run in runs]
                found.append((tier, packed(names), again))
        return found


def after(parent: int | None, previous: int, local: int) -> tuple[int | None, int, int, int]:
    sequence = sequence_hashes(local.to_bytes(8, "little"), previous)
    return parent, previous, local, int.from_bytes(sequence, "little")
