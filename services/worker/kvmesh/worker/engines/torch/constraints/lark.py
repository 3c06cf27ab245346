"""Translates choices and structural tags to grammars in llguidance's variant of Lark."""

import json
import re
from collections.abc import Mapping

# Unlimited whitespace would let a weak model fill its output with blanks.
_JSON_OPTIONS = {"whitespace_pattern": r"\n? {0,16}"}
_ANY = "/(.|\\n)*/"
# Keywords whose value maps names to schemas, and those whose value is data.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples")
# Formats that llguidance knows; any other is an annotation, as JSON Schema says.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)


def choice_grammar(options: object, special: Mapping[str, int]) -> str:
    """A grammar of fixed texts; raises ValueError unless `options` is an array of strings.

    `special` maps the texts of special tokens to their ids.
    """
    if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
        raise ValueError("choices must be a JSON array of strings")
    writer = _Writer(special)
    return "start: " + " | ".join(writer.literal(option) for option in options)


def structural_tag_grammar(tag: object, special: Mapping[str, int]) -> str:
    """A grammar of xgrammar's structural tags: a `format` tree, or the older flat `structures`.

    Raises ValueError for anything else.
    """
    writer = _Writer(special)
    match tag:
        case {"format": dict(tree)}:
            start = writer.node(tree)
        case {"structures": list(structures), "triggers": list(triggers)} if structures:
            start = writer.triggered(triggers, [_flat(s) for s in structures], False)
        case _:
            raise ValueError("a structural tag needs `format`, or `structures` and `triggers`")
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


def _flat(structure: object) -> dict[str, object]:
    match structure:
        case {"begin": str(begin), "schema": schema, "end": str(end)}:
            content = {"type": "json_schema", "json_schema": schema}
            return {"type": "tag", "begin": begin, "content": content, "end": end}
    raise ValueError("a structure needs `begin`, `schema` and `end`")


def readable(schema: object) -> object:
    """The same JSON schema for llguidance, with limited whitespace.

    It lacks what llguidance refuses although it restricts no instance: formats that it does not
    know, such as `binary`, and `propertyNames` that are any strings.
    """
    plain = _without_annotations(schema)
    return {"x-guidance": _JSON_OPTIONS, **plain} if isinstance(plain, dict) else plain


def _without_annotations(schema: object) -> object:
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, object] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key == "propertyNames" and value in (True, {}, {"type": "string"}):
            continue
        if key in _MAPS and isinstance(value, dict):
            kept[key] = {name: _without_annotations(each) for name, each in value.items()}
        else:
            kept[key] = value if key in _DATA else _without_annotations(value)
    return kept


class _Writer:
    """Turns nodes of a structural tag into rules; methods return the name of the added rule."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special = special
        texts = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def literal(self, text: str) -> str:
        """An expression that matches exactly this text."""
        parts = self._split.split(text) if self._split is not None else [text]
        whole = [self._part(part) for part in parts if part]
        return " ".join(whole) or '""'

    def _part(self, text: str) -> str:
        token = self._special.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def _text_until(self, end: str) -> str:
        """Free text up to and including the first occurrence of `end`."""
        first = self.literal(end).split(" ")[0]
        if first.startswith("<["):
            return self._add(f"{self._add(_ANY)} {self.literal(end)}")
        return self._add(_regex("(.|\\n)*" + re.escape(end)), "[lazy]")

    def node(self, node: object) -> str:
        match node:
            case {"type": "const_string", "value": str(value)}:
                return self._add(self.literal(value))
            case {"type": "json_schema", "json_schema": schema}:
                return self._add(_json(schema))
            case {"type": "regex", "pattern": str(pattern)}:
                return self._add(_regex(pattern))
            case {"type": "any_text"}:
                return self._add(_ANY)
            case {"type": "sequence", "elements": list(elements)} if elements:
                return self._add(" ".join(self.node(element) for element in elements))
            case {"type": "or", "elements": list(elements)} if elements:
                return self._add(" | ".join(self.node(element) for element in elements))
            case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
                return self._enclosed(begin, content, end)
            case {"type": "tags_with_separator", "tags": list(tags), **options} if tags:
                tag = self._add(" | ".join(self.node(tag) for tag in tags))
                if not options.get("stop_after_first"):
                    separator = self.literal(str(options.get("separator", "")))
                    tag = self._add(f"{tag} ({separator} {tag})*")
                return tag if options.get("at_least_one") else self._add(f"{tag}?")
            case {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **rest}:
                return self.triggered(triggers, tags, bool(rest.get("at_least_one")))
        raise ValueError(f"unknown structural tag {node!r:.80}")

    def triggered(
        self, triggers: list[str], tags: list[dict[str, object]], at_least_one: bool
    ) -> str:
        """Free text in which a trigger starts one of the tags that begin with that trigger."""
        if not tags:
            raise ValueError("triggered tags need tags")
        text = self._free(triggers)
        calls = " | ".join(self._after_trigger(triggers, tag, text) for tag in tags)
        return self._add(f"({calls}){'+' if at_least_one else '*'} {text}")

    def _free(self, triggers: list[str]) -> str:
        """Text without any of `triggers`; reasoning may open and close in it."""
        first = {self.literal(trigger).split(" ")[0] for trigger in triggers if trigger}
        tokens = [f"<[{i}]>" for i in self._special.values()]
        texts = [re.escape(t) for t in triggers if t and not self.literal(t).startswith("<[")]
        excluded = [" & ~" + _regex("(.|\\n)*" + text + "(.|\\n)*") for text in texts]
        name = f"TEXT{len(self.rules)}"
        self.rules.append(f"{name}: /(.|\\n)+/{''.join(excluded)}")
        parts = [name, *(token for token in tokens if token not in first)]
        return self._add(f"({' | '.join(parts)})*")

    def _after_trigger(self, triggers: list[str], tag: dict[str, object], text: str) -> str:
        begin, end = str(tag["begin"]), str(tag["end"])
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger matches the tag that begins with {begin!r}")
        if self.literal(begin).startswith("<["):
            trigger = ""
        head = f"{text} {self._text_until(trigger)}" if trigger else text
        return self._add(f"{head} {self._enclosed(begin[len(trigger) :], tag['content'], end)}")

    def _enclosed(self, begin: str, content: object, end: str) -> str:
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return self._add(f"{self.literal(begin)} {self._text_until(end)}")
        return self._add(f"{self.literal(begin)} {self.node(content)} {self.literal(end)}")

    def _add(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _json(schema: object) -> str:
    return f"%json {json.dumps(readable(schema))}"


def _regex(pattern: str) -> str:
    pattern = pattern.replace("\\\n", "\n").replace("\n", "\\n")  # a rule is one line
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern) + "/"
