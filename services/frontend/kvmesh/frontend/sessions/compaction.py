"""Summaries of conversations, which the model writes before it goes on with an answer."""

from dataclasses import dataclass

from kvmesh.frontend.apis.base import TokenLogprob, UnseenAnswer, Usage
from kvmesh.frontend.apis.content.compaction import summary_of, summary_request
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.conversation import AnswerEvent, TextDelta
from kvmesh.frontend.generation.active_request import RequestRunner
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor


class SummaryText(UnseenAnswer):
    """Collects the text of an answer that no client sees."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def events(self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        self._texts += [event.text for event in events if isinstance(event, TextDelta)]
        return b""


@dataclass(frozen=True)
class Compactor:
    """Has the model of a request summarize its conversation, at the cost of the same caller."""

    preprocessor: Preprocessor
    runner: RequestRunner

    async def summarize(
        self, prepared: PreparedRequest, account: Account | None, started: float
    ) -> tuple[str, Usage]:
        """The summary, and the usage of its generation. Raises ApiError.

        The prompt is the conversation's own with a last text, and so is mostly cached.
        """
        request = summary_request(prepared.request)
        asked = await self.preprocessor.prepare(request, prepared.model, prepared.adapter)
        answer = SummaryText()
        active = self.runner.run(asked, answer, started, account=account)
        async with active:
            await active.finished()
            usage = active.summary().usage
        return summary_of(answer.text), usage
