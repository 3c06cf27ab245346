"""Work whose constraint is compiled first: submitted, refused, too slow, aborted."""

import asyncio

from support.wait import eventually
from support.worker import prompt, work

from kvmesh.bus.messages import Guided, Sampling, Work
from kvmesh.worker.constraints.compiler import (
    CONCURRENCY,
    MAX_PER_OWNER,
    MAX_WAITING,
    Compiling,
    ConstraintCompiler,
)
from kvmesh.worker.engine import EngineError, OutputDelta, Rejected

GUIDED = Guided(kind="regex", value="a+")
WORK = work("r", prompt(10), sampling=Sampling(max_tokens=5, guided=GUIDED))


class Engine:
    """Compiles when `go` is set; then refuses if there is a `reason`."""

    def __init__(self, reason: str = "", fault: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self.reason = reason
        self.fault = fault
        self.known = "known"

    def compiled(self, guided: Guided) -> bool:
        return guided.value == self.known

    async def compile(self, guided: Guided) -> None:
        await self.go.wait()
        if self.fault is not None:
            raise self.fault
        if self.reason:
            raise Rejected(self.reason)


class RecordedCompiler:
    def __init__(self, engine: object) -> None:
        self.begun: list[str] = []
        self.deltas: list[OutputDelta] = []
        self.compiler = ConstraintCompiler(engine, self._begin, self.deltas.extend)

    def _begin(self, item: object) -> str:
        self.begun.append(WORK.request)
        return ""


async def test_only_uncompiled_constraints_wait() -> None:
    assert isinstance(Engine(), Compiling)
    compiler = RecordedCompiler(Engine()).compiler
    assert compiler.must_compile(WORK)
    known = Guided(kind="regex", value="known")
    assert not compiler.must_compile(work("r", b"", sampling=Sampling(max_tokens=1, guided=known)))
    assert not compiler.must_compile(work("r", b""))
    assert not RecordedCompiler(object()).compiler.must_compile(WORK)


async def test_it_begins_once_it_is_compiled_and_its_frontend_hears_so() -> None:
    engine = Engine()
    bench = RecordedCompiler(engine)
    bench.compiler.start(WORK)
    await asyncio.sleep(0)
    assert not bench.begun
    engine.go.set()
    await bench.compiler.drain()
    assert bench.begun == ["r"]
    assert bench.deltas == [OutputDelta("r", [])]


async def test_an_invalid_constraint_is_the_caller_s_fault() -> None:
    engine = Engine("it is malformed")
    bench = RecordedCompiler(engine)
    bench.compiler.start(WORK)
    engine.go.set()
    await bench.compiler.drain()
    assert not bench.begun
    assert bench.deltas == [
        OutputDelta("r", [], finish="error", error="it is malformed", invalid=True)
    ]


async def test_work_with_an_untried_constraint_is_handed_back() -> None:
    engine = Engine(fault=EngineError("nothing answers"))
    bench = RecordedCompiler(engine)
    bench.compiler.start(WORK)
    engine.go.set()
    await bench.compiler.drain()
    assert not bench.begun
    assert bench.deltas == [OutputDelta("r", [], finish="abort", error="nothing answers")]


async def test_aborted_work_never_begins() -> None:
    engine = Engine()
    bench = RecordedCompiler(engine)
    bench.compiler.start(WORK)
    assert bench.compiler.abort("r")
    assert not bench.compiler.abort("r")
    engine.go.set()
    await bench.compiler.drain()
    assert not bench.begun
    assert bench.deltas == [OutputDelta("r", [], finish="abort")]


def work_of(owner: str, request: str) -> Work:
    return work(request, prompt(10), sampling=WORK.sampling, tenant=f"{owner}/part")


async def test_only_so_many_wait_at_once_and_fewer_of_one_owner() -> None:
    bench = RecordedCompiler(Engine())
    for number in range(MAX_WAITING):
        owner = f"o{number // MAX_PER_OWNER}"
        assert bench.compiler.has_capacity(work_of(owner, f"r{number}"))
        bench.compiler.start(work_of(owner, f"r{number}"))
        if number == MAX_PER_OWNER - 1:
            assert not bench.compiler.has_capacity(work_of(owner, "more"))
    assert not bench.compiler.has_capacity(work_of("another", "r"))
    bench.compiler.close()
    await eventually(lambda: bench.compiler.has_capacity(work_of("o0", "r")))


class SlowEngine(Engine):
    """Records the compiled constraints; each takes until `go`, or fails after `most_s` seconds."""

    def __init__(self, most_s: float = 60.0) -> None:
        super().__init__()
        self.compiled_values: list[str] = []
        self.most_s = most_s

    async def compile(self, guided: Guided) -> None:
        self.compiled_values.append(guided.value)
        try:
            await asyncio.wait_for(super().compile(guided), self.most_s)
        except TimeoutError:
            raise Rejected("it takes too long") from None


async def test_slow_constraints_of_one_owner_do_not_delay_others() -> None:
    engine = SlowEngine(most_s=0.05)
    bench = RecordedCompiler(engine)
    for number in range(8):
        bench.compiler.start(work_of("hog", f"h{number}"))
    guided = Guided(kind="regex", value="mine")
    mine = work("m", b"", sampling=Sampling(max_tokens=1, guided=guided), tenant="me")
    bench.compiler.start(mine)
    await eventually(lambda: "mine" in engine.compiled_values)
    assert engine.compiled_values.index("mine") <= 2 + CONCURRENCY
    engine.go.set()
    await bench.compiler.drain()
    assert not [delta for delta in bench.deltas if delta.request == "m" and delta.error]


async def test_work_begins_once_another_request_has_compiled_its_constraint() -> None:
    engine = SlowEngine()
    bench = RecordedCompiler(engine)
    for number in range(2 * CONCURRENCY):
        bench.compiler.start(work_of("one", f"r{number}"))
    await eventually(lambda: len(engine.compiled_values) == CONCURRENCY)
    engine.known = GUIDED.value
    engine.go.set()
    await bench.compiler.drain()
    assert len(engine.compiled_values) == CONCURRENCY
    assert len(bench.begun) == 2 * CONCURRENCY
