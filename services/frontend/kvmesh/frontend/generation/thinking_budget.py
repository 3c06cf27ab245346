"""The most tokens that one answer may think, after which its thinking is ended. Pure."""

from kvmesh.frontend.generation.output import OutputPipeline

READ = 64  # tokens that an answer may take to show that it does not begin with thinking


class ThinkingBudget:
    """Counts the thinking of an answer up to `limit` tokens; `end` are the tokens that end it.

    `open` until the answer has left its thinking, or has shown that it begins without.
    """

    def __init__(self, limit: int, end: list[int], begins: bool) -> None:
        self._limit = limit
        self._end = end
        self._begins = begins  # the prompt has begun the thinking
        self._fed = 0
        self.open = True

    def room(self, pipeline: OutputPipeline) -> int:
        """Tokens that may be fed at once: with them, the thinking is not above the limit."""
        return max(self._limit - pipeline.reasoning_tokens, 0 if self._begins else 1)

    def exceeded(self, pipeline: OutputPipeline, fed: int, following: list[int]) -> bool:
        """True if the thinking is to end now, after `fed` more tokens and before `following`.

        It need not be ended if the tokens that follow end it.
        """
        self._fed += fed
        thinks = pipeline.thinks or (self._begins and not pipeline.began)
        if not thinks:
            self.open = not pipeline.began and self._fed < READ
            return False
        if pipeline.reasoning_tokens < self._limit:
            return False
        self.open = False
        return following[: len(self._end)] != self._end

    @property
    def end(self) -> list[int]:
        return self._end
