"""The text of the mock's answers: paragraphs about the mesh, written for this project."""

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from kvmesh.bus.storage.tokenizer_file import tokenizer_json

PASSAGE = """\
A worker keeps the keys and values of every token it has read. They live in blocks of equal size, \
and a block can serve any later prompt that begins in the same way.

When a prompt arrives, the router asks which workers already hold its beginning. The longer the \
shared beginning, the less there is to compute, and the sooner the first token can leave.

An agent sends almost the same prompt again and again. Each turn adds a few lines at the end: the \
result of a tool, an error message, a new question. Everything before them has been seen.

This text comes from the mock engine. It is always the same for the same prompt, so that a test \
can tell whether tokens were lost, repeated or delivered in the wrong order.

Blocks that nobody uses stay in memory until space is needed. The one that was returned longest \
ago goes first, and the end of a conversation goes before its beginning.

Reading a long prompt takes a large amount of arithmetic, but it can be done for many tokens at \
once. Writing an answer goes one token at a time, and each step has to look at all that came before.

A scheduler decides what the next step works on. It gives one token to every answer under way and \
fills the rest of its budget with pieces of new prompts, so that nobody waits for a long one.

If memory runs out, the youngest request gives its blocks back and waits. Most of what it computed \
is still there when its turn comes again, so little of the work is lost.

Every change to the cache is told to the mesh: blocks that are new, and blocks that are gone. The \
messages are numbered without holes, and whoever sees a hole can ask for the whole state.

A lease says that a process is alive. When it stops renewing, the others forget it within seconds, \
and requests that it had not begun to answer are sent elsewhere.

Numbers help to judge a design. Time to the first token tells how well prompts are placed, time \
between tokens tells how full the engines are, and the share of cached tokens explains both.

The frontend turns tokens back into text, finds the tool calls in it, and speaks to each client in \
the form that this client expects. It is the only part that a client ever sees.

"""


class TextSource:
    """A tokenized text and the offsets of its paragraphs.

    An answer starts at a paragraph, so that its text tokenizes to the same tokens again and the
    next turn of a conversation finds the answer's blocks in the cache.
    """

    def __init__(self, tokenizer: Tokenizer, text: str = PASSAGE) -> None:
        self.tokenizer = tokenizer
        encoding = tokenizer.encode(text, add_special_tokens=False)
        self.tokens: list[int] = encoding.ids
        starts = {0} | {i + 2 for i in range(len(text) - 2) if text[i : i + 2] == "\n\n"}
        self.paragraphs = [i for i, (begin, _) in enumerate(encoding.offsets) if begin in starts]
        if not self.paragraphs:
            self.paragraphs = [0]

    @classmethod
    @lru_cache(maxsize=8)
    def of_model(cls, folder: Path) -> "TextSource":
        """The text in the tokens of a model folder, shared by the engines of one process."""
        return cls(Tokenizer.from_buffer(tokenizer_json(folder)))


class TextReading:
    """The text from one of its paragraphs on, repeated without end."""

    __slots__ = ("_start", "_tokens")

    def __init__(self, source: TextSource, seed: int) -> None:
        self._tokens = source.tokens
        self._start = source.paragraphs[seed % len(source.paragraphs)]

    def slice(self, start: int, stop: int) -> list[int]:
        size = len(self._tokens)
        at, rest = (self._start + start) % size, stop - start
        found = self._tokens[at : at + rest]
        while len(found) < rest:
            found += self._tokens[: rest - len(found)]
        return found
