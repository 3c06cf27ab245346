"""Generates the training text of the demo tokenizer from a word list: prose, code, logs, JSON.

The seed determines the text, so the shipped tokenizer can be reproduced byte for byte.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

WORDS = Path(__file__).with_name("words.txt")
SUFFIXES = ("s", "ed", "ing", "er", "ly", "able")


def words() -> list[str]:
    """The distinct words of the list, in order."""
    lines = WORDS.read_text().splitlines()
    found = (word for line in lines if not line.startswith("#") for word in line.split())
    return list(dict.fromkeys(found))


def corpus(seed: int = 0, pieces: int = 12_000) -> Iterator[str]:
    """`pieces` short texts of mixed kinds, then each word repeatedly in several forms."""
    rng = random.Random(seed)
    writer = Writer(words(), rng)
    kinds: list[Callable[[], str]] = [
        writer.prose,
        writer.python,
        writer.shell,
        writer.log,
        writer.record,
        writer.markdown,
    ]
    for _ in range(pieces):
        yield rng.choice(kinds)()
    for word in writer.words:
        yield f" {word}" * 40
        yield f"{word}\n{word.capitalize()} {word.capitalize()}\n" * 6
        yield "".join(f" {inflected(word, suffix)}" for suffix in SUFFIXES[:3]) * 4


def inflected(word: str, suffix: str) -> str:
    """`word` with `suffix`, by the most common spelling rules of English."""
    if word.endswith("e") and suffix[0] in "ei":
        return word[:-1] + suffix
    if word.endswith("y") and len(word) > 2 and word[-2] not in "aeiou" and suffix[0] in "se":
        return word[:-1] + ("ies" if suffix == "s" else "i" + suffix)
    if word.endswith(("s", "x", "ch", "sh")) and suffix == "s":
        return word + "es"
    return word + suffix


class Writer:
    """Generates single texts by kind; `rng` makes all choices."""

    def __init__(self, words: list[str], rng: random.Random) -> None:
        self.words = words
        self._rng = rng

    def _some(self, least: int, most: int) -> list[str]:
        return self._rng.choices(self.words, k=self._rng.randint(least, most))

    def _word(self) -> str:
        return self._rng.choice(self.words)

    def _name(self) -> str:
        style = self._rng.randrange(4)
        parts = self._some(1, 3)
        if style == 0:
            return parts[0] + "".join(part.capitalize() for part in parts[1:])
        if style == 1:
            return "".join(part.capitalize() for part in parts)
        return "_".join(parts)

    def _path(self) -> str:
        suffix = self._rng.choice(("py", "rs", "go", "ts", "json", "toml", "md", "txt", "cpp"))
        return "/".join(self._some(1, 4)) + "." + suffix

    def _number(self) -> str:
        return self._rng.choice(
            (
                str(self._rng.randrange(10)),
                str(self._rng.randrange(1000)),
                f"{self._rng.random():.3f}",
            )
        )

    def _sentence(self) -> str:
        form = [
            inflected(word, self._rng.choice(SUFFIXES)) if self._rng.random() < 0.2 else word
            for word in self._some(4, 18)
        ]
        if len(form) > 8:
            form[4] += self._rng.choice((",", ";", ":", " -", ""))
        return " ".join(form).capitalize() + self._rng.choice(".....?!:")

    def prose(self) -> str:
        return " ".join(self._sentence() for _ in range(self._rng.randint(1, 5))) + "\n\n"

    def python(self) -> str:
        name, argument, result = self._name(), self._word(), self._word()
        kind = self._rng.choice(("int", "str", "float", "bool", "list[str]", "dict[str, int]"))
        return (
            f"from {self._word()}.{self._word()} import {self._name()}\n\n\n"
            f"def {name}({argument}: {kind}, {self._word()}={self._number()}) -> {kind} | None:\n"
            f'    """{self._sentence()}"""\n'
            f"    {result} = self.{self._name()}({argument}[{self._number()}])\n"
            f"    for {self._word()} in range(len({argument})):\n"
            f"        if not {result}.{self._name()} == {self._number()}:\n"
            f'            raise ValueError(f"{self._word()} {{{argument}!r}}")\n'
            f"            # {self._sentence()}\n"
            f"    return {result}\n"
        )

    def shell(self) -> str:
        return (
            f"$ {self._word()} --{self._word()}={self._number()} -{self._word()[0]} {self._path()}"
            f" | grep -rn '{self._word()}' ./{self._path()} && cd {self._path()} > /dev/null 2>&1\n"
        )

    def log(self) -> str:
        stamp = f"2026-{self._rng.randint(1, 12):02}-{self._rng.randint(1, 28):02}"
        level = self._rng.choice(("INFO", "WARNING", "ERROR", "DEBUG"))
        clock = f"{stamp}T12:{self._rng.randrange(60):02}:00Z"
        return f"{clock} {level} {self._word()}: {self._sentence()}\n"

    def record(self) -> str:
        inner = {self._name(): self._path(), self._word(): self._rng.randrange(1000)}
        value = {
            "name": self._name(),
            "arguments": inner,
            self._word(): [self._word(), True, None],
            "text": self._sentence(),
        }
        indent = 2 if self._rng.random() < 0.5 else None
        return json.dumps(value, indent=indent) + "\n"

    def markdown(self) -> str:
        items = "".join(f"- `{self._name()}`: {self._sentence()}\n" for _ in range(3))
        rows = "".join(f"| {self._word()} | {self._number()} |\n" for _ in range(2))
        table = f"| {self._word()} | {self._word()} |\n|---|---|\n{rows}"
        return f"## {self._sentence()}\n\n{items}\n{table}\n```sh\n{self.shell()}```\n"
