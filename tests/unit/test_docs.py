"""Links, anchors and source paths in all markdown files exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "services", "libs", "tools", "tests", "benchmarks", "examples", "compose")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))]
)

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?:services|libs|tools|tests|benchmarks|examples)/[\w./{},*-]*")
MODULE = re.compile(r"[\w-]+(?:/[\w-]+)*\.py")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


@cache
def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule."""
    found: set[str] = set()
    for heading in HEADING.findall(_prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeat, count = anchor, 0
        while repeat in found:
            count += 1
            repeat = f"{anchor}-{count}"
        found.add(repeat)
    return found


@cache
def _modules() -> list[str]:
    return [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def _alternatives(path: str) -> Iterator[str]:
    """Expand `{a,b}` as a shell does."""
    if (braces := re.search(r"\{([^{}]*)\}", path)) is None:
        yield path
        return
    for part in braces[1].split(","):
        yield from _alternatives(path[: braces.start()] + part + path[braces.end() :])


def _exists(path: str) -> bool:
    return any(ROOT.glob(path.rstrip("/"))) if "*" in path else (ROOT / path).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", _prose(page))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_the_repository_exist(page: Path) -> None:
    spans = (span.split("::")[0] for span in CODE.findall(_prose(page)))
    named = {word for span in spans for word in span.split() if PATH.fullmatch(word)}
    missing = [path for word in named for path in _alternatives(word) if not _exists(path)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_named_without_their_folder_exist(page: Path) -> None:
    named = set(filter(MODULE.fullmatch, CODE.findall(_prose(page))))
    assert not [path for path in named if not any(file.endswith(f"/{path}") for file in _modules())]


def test_every_decision_record_has_a_number_of_its_own_and_a_row_in_the_index() -> None:
    folder = ROOT / "docs/adr"
    records = sorted(folder.glob("[0-9]*.md"))
    numbers = [page.name.partition("-")[0] for page in records]
    assert len(numbers) == len(set(numbers))
    index = (folder / "README.md").read_text()
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in records]
    rows = [f"| [{title}]({page.name}) |" for title, page in zip(titles, records, strict=True)]
    assert [row for row in rows if row not in index] == []


GENERATED = ("configuration.md", "metrics.md", "tuning.md")


def test_no_page_of_the_manual_is_longer_than_4000_words() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED]
    words = {page.name: len(re.sub(r"[|]|---", " ", page.read_text()).split()) for page in pages}
    assert {name: count for name, count in words.items() if count > 4000} == {}


def test_every_page_is_in_the_index_of_the_docs() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []
