"""How a model family marks its thinking and writes its tool calls, as data.

A call section is opened by one of `Calls.begin` and closed by one of `Calls.end`; inside, calls
follow each other in one of the forms below. Literals in a tuple are alternatives.
"""

from typing import TypeAlias

from msgspec import Struct


class JsonObjects(Struct, frozen=True):
    """`{"name": …, "arguments": {…}}`, alone, in a list, or several behind each other.

    With `bare`, a section may also begin without marker, where an answer begins.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    bare: bool = False


class NamedJson(Struct, frozen=True):
    """A name, then the arguments as a JSON object: `open` NAME `between` {…} `close`.

    `open` must be there; whatever of `before` (behind it), `between` and `close` is, is skipped.
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
    """One tag a call and one an argument: `open` NAME `open_end` (`key` NAME `key_end` VALUE
    `value_end`)… `close`.

    Around a value, one `padding` on each side does not belong to it. `value` is a tag of its own
    between key and value. Of `before` and `after`, whatever is there is skipped.
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
    """`[name(key=value, …), …]` in Python's syntax; `bare` as for JSON."""

    bare: bool = True


class KeyedLiterals(Struct, frozen=True):
    """`open` NAME{key:value,…}, strings between two of `quote`, keys without quotes."""

    open: tuple[str, ...]
    quote: str


Form: TypeAlias = JsonObjects | NamedJson | Tagged | Pythonic | KeyedLiterals


class Calls(Struct, frozen=True):
    """The tool-call grammar of a family. The form is the first of `forms` that fits."""

    forms: tuple[Form, ...]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    separators: tuple[str, ...] = (",", ";")

    @property
    def openers(self) -> tuple[str, ...]:
        """What may begin a section anywhere in the text; a call's own marker may, too."""
        own = [o for form in self.forms for o in opening(form) if o]
        return (*self.begin, *own)

    @property
    def bare(self) -> str:
        """The characters that may begin a section where an answer begins."""
        marks = ""
        for form in self.forms:
            if isinstance(form, JsonObjects) and form.bare:
                marks += "{["
            if isinstance(form, Pythonic) and form.bare:
                marks += "["
        return marks


class Reasoning(Struct, frozen=True):
    """The thinking grammar of a family.

    `forced`: the output begins with thinking unless the prompt says otherwise. `calls_end_it`: a
    tool call may follow without the thinking having been closed.
    """

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    forced: bool = False
    calls_end_it: bool = False


def opening(form: Form) -> tuple[str, ...]:
    """The markers of a single call."""
    return () if isinstance(form, JsonObjects | Pythonic) else form.open
