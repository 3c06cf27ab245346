"""Grammar of a model family's thinking and tool calls, as data.

One of `ToolCallGrammar.begin` opens a section of calls and one of `end` closes it. Inside, calls
follow each other in one of the forms below. Strings in a tuple are alternatives.
"""

from typing import TypeAlias

from msgspec import Struct


class JsonObjects(Struct, frozen=True):
    """`{"name": …, "arguments": {…}}`, alone, in a list, or several in sequence.

    `bare`: a section may begin without a marker at the start of the output.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    bare: bool = False


class NamedJson(Struct, frozen=True):
    """A name, then the arguments as a JSON object: `open` NAME `between` {…} `close`.

    `open` is required; `before` (between `open` and NAME), `between` and `close` are optional.
    `call_id` introduces an id between name and arguments; `name` is a pattern whose first group
    is the function's name.
    """

    open: tuple[str, ...] = ("",)
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    call_id: str | None = None
    name: str = r"(.+)"


class Tagged(Struct, frozen=True):
    """One tag per call and per argument.

    `open` NAME `open_end` (`key` NAME `key_end` VALUE `value_end`)… `close`

    One `padding` on each side of a value is not part of it. `value` is a separate tag between key
    and value. `before` and `after` are optional.
    """

    open: tuple[str, ...]
    open_end: tuple[str, ...]
    key: str
    key_end: str
    value_end: str
    close: tuple[str, ...] = ()
    value: str | None = None
    padding: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class Pythonic(Struct, frozen=True):
    """`[name(key=value, …), …]` in Python's syntax; `bare` as in `JsonObjects`."""

    bare: bool = True


class KeyedLiterals(Struct, frozen=True):
    """`open` NAME{key:value,…}, with strings between two `quote` and keys without quotes."""

    open: tuple[str, ...]
    quote: str


CallForm: TypeAlias = JsonObjects | NamedJson | Tagged | Pythonic | KeyedLiterals


class ToolCallGrammar(Struct, frozen=True):
    """The tool-call grammar of a family; a call has the first of `forms` that matches."""

    forms: tuple[CallForm, ...]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    separators: tuple[str, ...] = (",", ";")

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that open a section or a single call, anywhere in the text."""
        calls = [o for form in self.forms for o in opening(form) if o]
        return (*self.begin, *calls)

    @property
    def bare(self) -> str:
        """The characters that may begin a section at the start of the output."""
        characters = ""
        for form in self.forms:
            if isinstance(form, JsonObjects) and form.bare:
                characters += "{["
            if isinstance(form, Pythonic) and form.bare:
                characters += "["
        return characters


class ReasoningGrammar(Struct, frozen=True):
    """The thinking grammar of a family.

    `forced`: the output begins with thinking unless the prompt has closed it. `calls_end_it`: a
    tool call ends thinking that was not closed.
    """

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    forced: bool = False
    calls_end_it: bool = False


def opening(form: CallForm) -> tuple[str, ...]:
    """The markers that open a single call; "" if it needs none."""
    return () if isinstance(form, JsonObjects | Pythonic) else form.open
