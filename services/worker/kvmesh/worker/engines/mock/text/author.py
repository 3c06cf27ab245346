"""Answers of the mock: a pure function of the prompt, so that every worker gives the same one."""

from dataclasses import dataclass
from random import Random

from kvmesh._native import xxh3
from kvmesh.bus.messages import Sampling, Work
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.worker.constraints.structural_tags import allows_free_text
from kvmesh.worker.enginecore.sequence import TokenSource
from kvmesh.worker.engines.mock.text.guided import generate
from kvmesh.worker.engines.mock.text.script import TAIL_TOKENS, Script
from kvmesh.worker.engines.mock.text.source import TextReading, TextSource

MARKER_TOKENS = 32


class ConcatenatedTokens:
    """A list of tokens, then those of another source."""

    __slots__ = ("_head", "_rest")

    def __init__(self, head: list[int], rest: TokenSource) -> None:
        self._head = head
        self._rest = rest

    def slice(self, start: int, stop: int) -> list[int]:
        size = len(self._head)
        if start >= size:
            return self._rest.slice(start - size, stop - size)
        found = self._head[start:stop]
        return found if stop <= size else found + self._rest.slice(0, stop - size)


class FixedTokens:
    """A fixed list of tokens."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def slice(self, start: int, stop: int) -> list[int]:
        return self.tokens[start:stop]


@dataclass(frozen=True)
class MockAnswer:
    """The tokens of an answer, their number, and the finish reason."""

    source: TokenSource
    target: int
    finish: str


@dataclass(frozen=True)
class AnswerOptions:
    """Length and shape of answers, in tokens.

    An answer ends after `output_tokens`, plus or minus up to half as many by its seed, unless the
    request's limit or `context` ends it first. It begins with `reasoning_tokens` of thinking, if
    any, between the two marks, unless the end of the prompt forbids thinking.
    """

    context: int
    output_tokens: int = 512
    seed: int = 0
    reasoning_tokens: int = 0
    think_open: str = "<think>\n"
    think_close: str = "\n</think>\n\n"


class AnswerWriter:
    """Answers prompts from the script if it has an entry, else from the text source."""

    def __init__(
        self, source: TextSource, options: AnswerOptions, script: Script | None = None
    ) -> None:
        self.options = options
        self._tokenizer = source.tokenizer
        self._source = source
        self._script = script
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values())

    def answer(self, work: Work) -> MockAnswer:
        """The whole answer to `work`, including tokens that an earlier worker has generated.

        Raises UnsupportedConstraint for a constraint that the mock cannot follow.
        """
        seed, guided = self._seed(work), work.sampling.guided
        scripted = self._scripted(work)
        if scripted is not None:
            whole = self._finite(work, self._as_given(work, self._encode(scripted)))
        elif guided is not None and not allows_free_text(guided):
            text = generate(guided, Random(seed))
            whole = self._finite(work, self._thinking(work, seed) + self._encode(text))
        else:
            whole = self._unbounded(work, self._thinking(work, seed), seed)
        return _cut_at_stop(whole, work.sampling, work.generated)

    def text(self, tokens: list[int]) -> str:
        """Decode tokens."""
        return str(self._tokenizer.decode(tokens))

    def _seed(self, work: Work) -> int:
        """A hash of the original prompt, unchanged by a migration."""
        seed = self.options.seed + (work.sampling.seed or 0)
        return xxh3(_original(work), seed & (2**64 - 1))

    def _scripted(self, work: Work) -> str | None:
        if self._script is None:
            return None
        end = self._prompt_end(work, TAIL_TOKENS) if self._script.reads_prompts else ""
        entry = self._script.find(work.session, work.turn, end)
        return entry.text if entry is not None else None

    def _thinking(self, work: Work, seed: int) -> list[int]:
        options = self.options
        if not options.reasoning_tokens:
            return []
        end = self._prompt_end(work, MARKER_TOKENS).rstrip()
        if end.endswith(options.think_close.strip()):
            return []
        opened = end.endswith(options.think_open.strip())
        thoughts = TextReading(self._source, seed >> 8).slice(0, options.reasoning_tokens)
        mark = [] if opened else self._encode(options.think_open)
        return self._as_given(work, mark + thoughts + self._encode(options.think_close))

    def _as_given(self, work: Work, tokens: list[int]) -> list[int]:
        """The beginning of an answer with the thinking that the generated tokens have ended."""
        if not work.generated:
            return tokens
        mark = self._encode(self.options.think_close.strip())
        given = memoryview(work.tokens).cast("I")[-work.generated :].tolist()
        own, ended = _end_of(tokens, mark), _end_of(given, mark)
        if not own or not ended or given[:ended] == tokens[:ended]:
            return tokens
        return given[:ended] + tokens[own:]

    def _unbounded(self, work: Work, head: list[int], seed: int) -> MockAnswer:
        reading: TokenSource = TextReading(self._source, seed)
        source = ConcatenatedTokens(head, reading) if head else reading
        sampling = work.sampling
        bound = min(sampling.max_tokens, self._max_output(work))
        natural = max(len(head) + self._length(seed), sampling.min_tokens)
        if sampling.ignore_eos or natural >= bound:
            return MockAnswer(source, bound, "length")
        return MockAnswer(source, natural, "stop")

    def _length(self, seed: int) -> int:
        middle = self.options.output_tokens
        return max(1, middle - middle // 2 + (seed >> 16) % (middle + 1))

    def _finite(self, work: Work, tokens: list[int]) -> MockAnswer:
        bound = min(work.sampling.max_tokens, self._max_output(work))
        if len(tokens) <= bound:
            return MockAnswer(FixedTokens(tokens), len(tokens), "stop")
        return MockAnswer(FixedTokens(tokens), bound, "length")

    def _max_output(self, work: Work) -> int:
        return self.options.context - len(_original(work)) // 4

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def _prompt_end(self, work: Work, count: int) -> str:
        tokens = memoryview(_original(work)[-TOKEN_BYTES * count :]).cast("I").tolist()
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _original(work: Work) -> bytes:
    return work.tokens[: len(work.tokens) - TOKEN_BYTES * work.generated]


def _cut_at_stop(whole: MockAnswer, sampling: Sampling, generated: int) -> MockAnswer:
    if not sampling.stop_token_ids:
        return whole
    first = max(generated, sampling.min_tokens)
    tokens = whole.source.slice(first, whole.target)
    at = next((i for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
    return whole if at is None else MockAnswer(whole.source, first + at + 1, "stop")


def _end_of(tokens: list[int], mark: list[int]) -> int:
    """The place behind the first `mark` among tokens; 0 if it is not there."""
    size = len(mark)
    ends = range(size, len(tokens) + 1)
    return next((end for end in ends if tokens[end - size : end] == mark), 0)
