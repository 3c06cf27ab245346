"""vLLM's sleep mode, against its interface."""

from typing import Any

import pytest

from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.engines.vllm.sleep_mode import SLEEP_ARGUMENT, SleepMode, died, sleep_mode


class Llm:
    """Records the calls of vLLM's interface; `broken` ones raise, a `deaf` one does nothing."""

    def __init__(self, broken: str = "", deaf: bool = False) -> None:
        self.calls: list[Any] = []
        self.asleep = False
        self.errored = False
        self._broken = broken
        self._deaf = deaf

    def _call(self, name: str, *arguments: Any) -> None:
        if name == self._broken:
            raise RuntimeError("out of memory")
        self.calls.append((name, *arguments))

    async def sleep(self, level: int, mode: str) -> None:
        self._call("sleep", level, mode)
        self.asleep = not self._deaf

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self._call("wake_up", tags)
        self.asleep = self._deaf or tags == ["weights"]
        return not self.asleep

    async def collective_rpc(self, method: str) -> None:
        self._call(method)

    async def is_sleeping(self) -> bool:
        return self.asleep


async def test_weights_are_kept_in_the_host_or_loaded_again() -> None:
    kept, dropped = Llm(), Llm()
    for level, llm in ((1, kept), (2, dropped)):
        mode = SleepMode(level, "")
        await mode.sleep(llm)
        assert llm.asleep
        await mode.wake(llm)
        assert not llm.asleep
    assert kept.calls == [("sleep", 1, "abort"), ("wake_up", None)]
    assert dropped.calls == [
        ("sleep", 2, "abort"),
        ("wake_up", ["weights"]),
        ("reload_weights",),
        ("wake_up", ["kv_cache"]),
    ]


@pytest.mark.parametrize("llm", [Llm("sleep"), Llm(deaf=True)])
async def test_a_vllm_that_stays_awake_is_an_error(llm: Llm) -> None:
    with pytest.raises(EngineError, match="asleep"):
        await SleepMode(1, "").sleep(llm)


@pytest.mark.parametrize("llm", [Llm("wake_up"), Llm("reload_weights"), Llm(deaf=True)])
async def test_a_vllm_that_does_not_wake_is_an_error(llm: Llm) -> None:
    with pytest.raises(EngineError, match=r"does not wake|not woken"):
        await SleepMode(2, "").wake(llm)


async def test_a_vllm_that_dies_asleep_is_lost() -> None:
    llm = Llm()
    llm.errored = True
    assert "died" in str(await died(llm, 0.01))


def test_a_reason_says_what_to_change() -> None:
    on = {SLEEP_ARGUMENT: True}
    assert sleep_mode(on, 1, available=True, holds_memory=False).problem == ""
    assert SLEEP_ARGUMENT in sleep_mode({}, 1, available=False, holds_memory=False).problem
    assert "connector" in sleep_mode(on, 1, available=True, holds_memory=True).problem
    adapters = on | {"enable_lora": True}
    assert "adapters" in sleep_mode(adapters, 2, available=True, holds_memory=False).problem
    assert sleep_mode(adapters, 1, available=True, holds_memory=False).problem == ""
    with pytest.raises(EngineConfigError, match=SLEEP_ARGUMENT):
        sleep_mode(on, 1, available=False, holds_memory=False)
