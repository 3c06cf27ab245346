"""The process beside the oracle that simulates: one question at a time."""

import asyncio
import contextlib
import time

import msgspec

from kvmesh.bus.messages import FleetAnswer, FleetQuestion, MessageDecoder
from kvmesh.oracle.evaluation import FIRST_RATE, QuestionError, answer
from kvmesh.runtime.piped_process import PipedProcess, Send, serve_frames
from kvmesh.settings.schema import RouterSettings
from kvmesh.workload.capture import CapturedRound

GRACE_S = 3.0  # beyond the budget, for the transfer and the end of a step


class SimulationTask(msgspec.Struct, frozen=True, kw_only=True):
    """A question with the requests to simulate; `rate` is as in `evaluation.answer`."""

    question: FleetQuestion
    captured: list[CapturedRound]
    router: RouterSettings
    rate: float


_answers = MessageDecoder(FleetAnswer)
_tasks = MessageDecoder(SimulationTask)


class SimulationProcess:
    """Asks the process, which is killed if it fails or exceeds its budget."""

    def __init__(self, router: RouterSettings) -> None:
        self._router = router
        self._process = PipedProcess("kvmesh.oracle.process")
        self._rate = FIRST_RATE

    async def start(self) -> None:
        """Start the process ahead of the first question; a failure shows with that."""
        with contextlib.suppress(OSError):
            await self._process.start()

    async def answer(self, question: FleetQuestion, captured: list[CapturedRound]) -> FleetAnswer:
        """The answer; one with `error` if the process fails or takes longer than the budget."""
        task = SimulationTask(
            question=question, captured=captured, router=self._router, rate=self._rate
        )
        try:
            async with asyncio.timeout(question.budget_s + GRACE_S):
                await self._process.send(msgspec.msgpack.encode(task))
                found = _answers.decode(await self._process.receive())
        except TimeoutError:
            await self.close()
            return FleetAnswer(error=f"killed after {question.budget_s + GRACE_S:g} s")
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self.close()
            return FleetAnswer(error=f"the simulating process failed: {type(error).__name__}")
        except asyncio.CancelledError:
            await self.close()
            raise
        if found.candidates and found.seconds > 0:
            self._rate = len(found.candidates) * found.requests / found.seconds
        return found

    async def close(self) -> None:
        """Kill the process, if there is one."""
        await self._process.close()


def simulate_task(data: bytes, send: Send) -> None:
    """Answer a task."""
    task = _tasks.decode(data)
    try:
        found = answer(task.question, task.captured, task.router, task.rate, time.monotonic)
    except QuestionError as error:
        found = FleetAnswer(error=str(error))
    except Exception as error:
        found = FleetAnswer(error=f"{type(error).__name__}: {error}")
    send(msgspec.msgpack.encode(found))


if __name__ == "__main__":
    serve_frames(simulate_task)
