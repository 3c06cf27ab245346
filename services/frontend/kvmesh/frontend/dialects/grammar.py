"""Grammar of a model family's thinking and tool calls, as data.

One of `ToolCallGrammar.begin` opens a section of calls and one of `end` closes it. Inside, calls
follow each other in one of the forms below. Strings in a tuple are alternatives.
"""

from typing import TypeAlias

from msgspec import Struct


class JsonObjects(Struct, frozen=True, tag=True, omit_defaults=True):
    """`{"name": …, "arguments": {…}}`, alone, in a list, or several in sequence.

    `bare`: a section may begin without a marker at the start of the output. `open` and `close`
    are markers around each object, if it has its own.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    bare: bool = False
    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()


class NameKeys(Struct, frozen=True, tag=True, omit_defaults=True):
    """`{"NAME": {…}}`, alone or in a list: the name is the key of the arguments."""


class Arguments(Struct, frozen=True, tag=True, omit_defaults=True):
    """The arguments alone, as a JSON object; the header of its channel names the function."""


class NamedJson(Struct, frozen=True, tag=True, omit_defaults=True):
    """A name, then the arguments as a JSON object: `open` NAME `between` {…} `close`.

    `open` is required; `before` (between `open` and NAME), `between` and `close` are optional.
    `call_id` introduces an id between name and arguments, `id_end` closes one before the name;
    `name` is a pattern whose first group is the function's name.
    """

    open: tuple[str, ...] = ("",)
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    call_id: str | None = None
    id_end: str | None = None
    name: str = r"(.+)"


class Tagged(Struct, frozen=True, tag=True, omit_defaults=True):
    """One tag per call and per argument.

    `open` NAME `open_end` (`key` NAME `key_end` VALUE `value_end`)… `close`

    One `padding` on each side of a value is not part of it. `value` is a separate tag between key
    and value; before it, `kind` are tags around the value's JSON type. `wrap` are marks around a
    value that models write if it contains markup, `whole` marks around all arguments as one JSON
    object. All of these, `before` and `after` are optional. Without `named`, the header of the
    call's channel names the function. `escaped`: names in quotes are escaped as in XML.
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
    kind: tuple[str, str] | None = None
    wrap: tuple[str, str] | None = None
    whole: tuple[str, ...] = ()
    named: bool = True
    escaped: bool = False


class Elements(Struct, frozen=True, tag=True, omit_defaults=True):
    """One element per call and per argument, and nested ones for objects and lists.

    `open` NAME `open_end` (`mark`<KEY>VALUE`mark`</KEY>)… `close`

    A list is a sequence of elements with the name `item`.
    """

    mark: str
    open: tuple[str, ...]
    open_end: tuple[str, ...]
    close: tuple[str, ...]
    item: str = "item"


class Pythonic(Struct, frozen=True, tag=True, omit_defaults=True):
    """`[name(key=value, …), …]` in Python's syntax; `bare` as in `JsonObjects`."""

    bare: bool = True


class KeyedLiterals(Struct, frozen=True, tag=True, omit_defaults=True):
    """`open` NAME{key:value,…}, with strings between two `quote` and keys without quotes."""

    open: tuple[str, ...]
    quote: str


CallForm: TypeAlias = (
    JsonObjects | NameKeys | Arguments | NamedJson | Tagged | Elements | Pythonic | KeyedLiterals
)


class Frame(Struct, frozen=True, omit_defaults=True):
    """Markers around visible text, which are not part of it.

    `open` counts at the start of a text, `close` where the output, or a call, follows it.
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()


class ToolCallGrammar(Struct, frozen=True, omit_defaults=True):
    """The tool-call grammar of a family; a call has the first of `forms` that matches."""

    forms: tuple[CallForm, ...]
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    separators: tuple[str, ...] = (",", ";")
    frame: Frame = Frame()

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


class ReasoningGrammar(Struct, frozen=True, omit_defaults=True):
    """The thinking grammar of a family.

    `forced`: the output begins with thinking unless the prompt has closed it. `calls_end_it`: a
    tool call ends thinking that was not closed.
    """

    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    forced: bool = False
    calls_end_it: bool = False
    frame: Frame = Frame()


class OwnGrammar(Struct, frozen=True, omit_defaults=True):
    """The grammar in a model's own folder: of its calls, of its thinking, or of both."""

    tool_calls: ToolCallGrammar | None = None
    reasoning: ReasoningGrammar | None = None


class ChannelGrammar(Struct, frozen=True):
    """The grammar of a family whose output is a sequence of messages on channels.

    `start` HEADER `mark` BODY `end`, where the prompt already contains the first `start`. HEADER
    and mark together tell the channel: the first of the patterns `thinking`, `text` and `calls`
    that matches. A group `name` in `calls` is the function's name. `header` matches every beginning
    of a HEADER. `known`: only a tool of the request can be called. `recipient` begins a HEADER that
    may follow thinking directly, without `end` and `start`.
    """

    start: tuple[str, ...]
    mark: tuple[str, ...]
    end: tuple[str, ...]
    header: str
    thinking: str
    text: str
    calls: str
    forms: tuple[CallForm, ...]
    known: bool = False
    recipient: str = ""


def opening(form: CallForm) -> tuple[str, ...]:
    """The markers that open a single call; "" if it needs none."""
    return () if isinstance(form, NameKeys | Arguments | Pythonic) else form.open


def closing(form: CallForm) -> tuple[str, ...]:
    """The markers that close a single call."""
    return () if isinstance(form, NameKeys | Arguments | Pythonic | KeyedLiterals) else form.close
