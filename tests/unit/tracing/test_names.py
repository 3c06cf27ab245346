"""The table of names: complete, and as documented."""

import re
from pathlib import Path

from kvmesh.bus.messages import StartPhase
from kvmesh.tracing import names

ROOT = Path(__file__).parents[3]
SOURCES = [p for folder in ("libs", "services") for p in (ROOT / folder).rglob("*.py")]


def constants() -> dict[str, str]:
    own = ("OPT_IN", "PROVIDER", "FIRST_TOKEN")
    return {
        name: value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name not in own
    }


def test_every_name_is_in_a_table_once() -> None:
    listed = [s.name for s in names.SPANS] + [a.key for a in names.ATTRIBUTES]
    starts = [names.start_span(phase) for phase in StartPhase]
    assert sorted([*constants().values(), *starts]) == sorted(listed)
    conventions = list(names.CONVENTIONS.values())
    assert len(set(conventions)) == len(conventions)


def test_every_name_is_used() -> None:
    text = "\n".join(p.read_text() for p in SOURCES if p.name != "names.py")
    assert constants().keys() <= set(re.findall(r"\b[A-Z]\w+\b", text))


def test_the_documentation_lists_every_name() -> None:
    page = (ROOT / "docs" / "tracing.md").read_text()
    spans = [f"| `{s.name}` | {s.process} | {s.meaning} |" for s in names.SPANS]
    attributes = [
        f"| `{a.key}` | {f'`{a.convention}`' if a.convention else ''} | {a.meaning} |"
        for a in names.ATTRIBUTES
    ]
    assert [row for row in (*spans, *attributes) if row not in page] == []
