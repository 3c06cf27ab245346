"""The work of `kvmesh model parser new`: a draft, its proof, and the file that it goes into."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvmesh.bus.storage.model_files import pack, unpack
from kvmesh.frontend.conversation import AnswerEvent
from kvmesh.frontend.dialects import ChatTemplate, choose_grammar
from kvmesh.frontend.dialects.drafting import draft
from kvmesh.frontend.dialects.output import OWN, OutputGrammar
from kvmesh.frontend.dialects.own_grammar import FILE
from kvmesh.frontend.dialects.preview import merge_deltas, shown
from kvmesh.frontend.dialects.read_back import reads_back

SPLITS = 20


class DraftFailed(Exception):
    """No parser can be drafted; the message says why, and what to do."""


class Proof(NamedTuple):
    """The reading of one text by a grammar: its `parts`, for people."""

    of: str
    ok: bool
    detail: str
    parts: str = ""


@dataclass(frozen=True)
class NewParser:
    """A draft and its proofs. `known`: parsers that read all of it already; else `hints` do."""

    known: str
    hints: dict[str, Any]
    proofs: list[Proof]

    def write(self, folder: Path) -> Path:
        """Add the draft to the folder's `kvmesh.json`."""
        file = folder / FILE
        present = json.loads(file.read_bytes()) if file.is_file() else {}
        file.write_text(json.dumps(present | self.hints, indent=2, ensure_ascii=False) + "\n")
        return file


def new_parser(folder: Path, outputs: Mapping[str, str]) -> NewParser:
    """A parser for the model in `folder`, proved on its template and on raw outputs.

    Raises DraftFailed if it cannot be drafted or does not read an output's calls, and
    ModelFilesError or DialectError for an unusable folder.
    """
    files = unpack(pack(folder))
    template = ChatTemplate(files)
    written = len(template.written_calls)
    if not written:
        raise DraftFailed(f"the chat template in {folder} shows no tools, or no calls")
    known = choose_grammar(folder.name, template)
    proofs = list(_proofs(known, outputs))
    if reads_back(template, known) and all(proof.ok for proof in proofs):
        names = dict.fromkeys(filter(None, (known.tool_parser, known.reasoning_parser)))
        return NewParser(" and ".join(names), {}, proofs)
    made = draft(template)
    if made is None:
        shape = template.written_calls[-1].output[:400]
        raise DraftFailed(
            f"no form of calls fits what the template writes:\n{shape}\n"
            "docs/parsers.md lists the forms; write own_parser in kvmesh.json by hand"
        )
    grammar = made.grammar
    reasoning = known.reasoning_parser
    if made.own.reasoning is None and reasoning:
        grammar = OutputGrammar(OWN, reasoning, made.own)
    names = {"tool_parser": grammar.tool_parser, "reasoning_parser": grammar.reasoning_parser}
    hints: dict[str, Any] = {field: name for field, name in names.items() if name}
    hints["own_parser"] = msgspec.to_builtins(made.own)
    ok = made.read == made.written and made.thinking
    detail = f"{made.read} of {made.written} turns with calls" + (
        "" if made.thinking else ", not their thinking"
    )
    return NewParser("", hints, [Proof("the template", ok, detail), *_proofs(grammar, outputs)])


def _proofs(grammar: OutputGrammar, outputs: Mapping[str, str]) -> Iterator[Proof]:
    """One for each output: it has a call, and is read alike whole and in pieces."""
    for name, text in outputs.items():
        whole = _read(grammar, [text])
        calls = sum(kind == "call" for kind, _, _ in whole)
        alike = sum(_read(grammar, pieces) == whole for pieces in _splits(text))
        ok = calls > 0 and alike == SPLITS
        detail = f"{calls} calls, alike in {alike} of {SPLITS} random splits"
        yield Proof(name, ok, detail, shown(grammar, text))


def _read(grammar: OutputGrammar, pieces: list[str]) -> list[tuple[str, str, str]]:
    parser = grammar.parser([], eager=False, new_id=lambda: "")
    events: list[AnswerEvent] = [event for piece in pieces for event in parser.feed(piece)]
    return merge_deltas([*events, *parser.finish()])


def _splits(text: str) -> Iterator[list[str]]:
    rng = random.Random(0)
    for _ in range(SPLITS):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(min(len(text), 40)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
