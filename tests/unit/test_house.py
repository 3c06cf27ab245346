"""Conventions that hold in the whole source tree."""

import ast
import re
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("libs", "services", "tools")
INTERROGATIVES = ("What", "Which", "Who", "Whose", "How", "Where", "Whether", "Why", "When")

INTERROGATIVE = re.compile(rf"""["']\s*({"|".join(INTERROGATIVES)})\s""")
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def modules(*folders: str) -> list[Path]:
    """All modules below the folders, or below those of the sources, relative to the root."""
    found = [path for folder in folders or SOURCES for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found)


def test_public_classes_have_unique_names() -> None:
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules():
        for name in CLASS.findall((ROOT / module).read_text()):
            if not name.startswith("_"):
                defined[name].append(str(module))
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}


def test_no_docstring_begins_with_an_interrogative() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {
        module: (ROOT / module).read_text() for module in modules(*SOURCES, "tests", "benchmarks")
    }
    found = [
        (str(module), text)
        for module, source in texts.items()
        if INTERROGATIVE.search(source)  # of few modules, which then are parsed
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    ]
    assert texts
    assert [each for each in found if each[1].split(maxsplit=1)[0] in INTERROGATIVES] == []


# A word with one meaning, and where modules, folders and public classes may be called by it.
ONE_MEANING = {
    # a coding agent, and in transfers the agent of NIXL
    "agent": "bus transfer workload frontend router",
    # what the cache did for a request, or for a tenant
    "account": "bus frontend",
    # the return of a prompt; the planner predicts loads
    "forecast": "bus returns",
    # what an engine's events say that it holds
    "ledger": "worker",
    # what learns from requests and is judged against a fallback
    "learner": "bus",
}


def test_a_word_has_one_meaning() -> None:
    astray = []
    for module in modules():
        owner = module.parts[1 if module.parts[0] == "services" else 2]
        names = [*module.with_suffix("").parts[3:]]
        names += CLASS.findall((ROOT / module).read_text())
        for name in names:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
            for word, owners in ONE_MEANING.items():
                if words & {word, f"{word}s"} and owner not in owners.split():
                    astray.append(f"{name} in {module}")
    assert astray == []


def test_every_package_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["scikit-build"]["wheel"]["packages"].values()
    folders = [*ROOT.glob("libs/kvmesh/*/"), *ROOT.glob("tools/kvmesh/*/")]
    folders += ROOT.glob("services/*/kvmesh/*/")
    with_modules = {f.relative_to(ROOT).as_posix() for f in folders if any(f.rglob("*.py"))}
    assert set(listed) == with_modules


MOST_MODULES = 14


def test_no_folder_holds_too_many_modules() -> None:
    folders = Counter(str(m.parent) for m in modules() if m.name != "__init__.py")
    assert {f: n for f, n in folders.items() if n > MOST_MODULES} == {}
