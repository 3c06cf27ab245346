"""The table of abilities in the documentation, and the declarations behind it."""

from pathlib import Path

from kvmesh.worker.abilities import ABILITIES, DECLARED, markdown
from kvmesh.worker.engine import FACTORIES

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def test_every_engine_declares_known_abilities() -> None:
    assert list(DECLARED) == list(FACTORIES)
    for declared in DECLARED.values():
        assert set(declared) <= set(ABILITIES)


def test_the_table_in_the_documentation_is_current() -> None:
    assert markdown() in PAGE.read_text(), "run `make docs`"
