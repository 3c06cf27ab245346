"""The cost of the frontend's own code, measured in this process: the floor under its figures.

The token path runs twice: with warm processor caches, and after a walk through other memory
before every engine step, as other processes cause between two steps 10 ms apart.
"""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import uvloop
from chat_load import MODEL, chat, user
from common import Report, median

from kvmesh.bus.messages import Chunk, ModelCard, StepOutput, encode
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import RequestStamp
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.dispatch.token_inbox import TokenInbox, step_decoder
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.active_request import DISCARD
from kvmesh.frontend.generation.choice import AnswerContext, Choice
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor, render

MEMO_BYTES = 256 << 20
WALKED = 64 << 20
STREAMS = 8
STEPS = 600
STAMP = RequestStamp("0" * 24, 0)


def served() -> ServedModel:
    """The demo model as a frontend loads it."""
    card = ModelCard(name=MODEL, files="", block_size=16, context=1 << 17)
    files = {file.name: file.read_bytes() for file in model_dir().iterdir() if file.is_file()}
    return ServedModel(card, Dialect(card, files), created=0)


def turn_stages(report: Report, model: ServedModel, turns: Iterator[bytes]) -> None:
    """Milliseconds of each preprocessing stage of a turn; later turns have cached prefixes."""
    rows = uvloop.run(_turns(model, list(turns)))
    for place, name in enumerate(("parse its body", "render it", "tokens, hashes")):
        here = median([row[place] for row in rows[2:]])
        report.add(f"frontend, turn of 40K tokens: {name}", here, "CPU ms")


async def _turns(model: ServedModel, bodies: list[bytes]) -> list[tuple[float, float, float]]:
    preparer, api = Preprocessor(MEMO_BYTES, TenantNamespaces()), Chat()
    rows = []
    for body in bodies:
        started = time.thread_time()
        turn = preparer.turns.open("", api.name, body)
        request = api.parse(body, {}, STAMP, turn).request
        turn.keep(request, "")
        parsed = time.thread_time()
        render(request, model)
        rendered = time.thread_time()
        await preparer.prepare(request, model, None)
        rest = time.thread_time() - rendered - (rendered - parsed)
        rows.append(((parsed - started) * 1e3, (rendered - parsed) * 1e3, rest * 1e3))
    return rows


def token_path(report: Report, model: ServedModel) -> None:
    """Microseconds from a message of the bus to the frame for a socket."""
    for name, walked in (("caches warm", 0), ("caches cold", WALKED)):
        here = uvloop.run(_tokens(model, walked)) * 1e6
        report.add(f"frontend, bus to frame, {name}", here, "CPU µs/token")


async def _tokens(model: ServedModel, walked: int) -> float:
    inbox = TokenInbox(0.0)
    streams = [_stream(model, inbox, number) for number in range(STREAMS)]
    other = np.zeros(max(walked, 8) // 8)
    spent = 0.0
    for step in range(STEPS):
        chunks = [Chunk(s.attempt, step, [300 + step % 64]) for s in streams]
        message = encode(StepOutput("worker-0", chunks))
        other += 1
        started = time.thread_time()
        inbox.receive(step_decoder.decode(message))
        await asyncio.sleep(0)
        spent += time.thread_time() - started
    return spent / STEPS / STREAMS


def _stream(model: ServedModel, inbox: TokenInbox, number: int) -> TokenStream:
    call = Chat().parse(chat(user("Hello"), STEPS, True), {}, STAMP)
    dialect = model.dialect
    parser = dialect.grammar.parser([], "<|im_start|>assistant\n", calls=False)
    pipeline = OutputPipeline(dialect.detokenizers.create(), [], parser)
    stream = TokenStream(f"{call.request.id}-{number}", 0.0)
    answer = AnswerContext(call.renderer, DISCARD, lambda _: None, lambda: b"")
    choice = Choice(0, stream, pipeline, answer)
    stream.next_attempt()
    stream.dispatched("worker-0", 0.0)
    inbox.add(stream, choice.flush)
    return stream
