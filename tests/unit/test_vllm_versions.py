"""The releases of vLLM that the package, the Makefile, the images and the docs name agree."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRA = re.compile(r"vllm>=(\d+)\.(\d+),<(\d+)\.(\d+)")


def named(pattern: str, *paths: str) -> set[str]:
    """All that the group of `pattern` matches in these files or folders of text."""
    files = [file for path in paths for file in ([ROOT / path] if "." in path else pages(path))]
    return {found for file in files for found in re.findall(pattern, file.read_text())}


def pages(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.md"))


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def releases() -> tuple[str, str]:
    """The release of the CPU build and the newer one, from the Makefile."""
    text = (ROOT / "Makefile").read_text()
    found = [re.search(rf"^{name} \S?= (\S+)$", text, re.MULTILINE) for name in NAMES]
    first, last = (match.group(1) for match in found if match is not None)
    return first, last


NAMES = ("VLLM_CPU", "VLLM")


def test_the_extra_allows_the_tested_releases_and_no_others() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (bounds,) = [match.groups() for text in extras["vllm"] if (match := EXTRA.fullmatch(text))]
    first, last = releases()
    assert minor(first) == f"{bounds[0]}.{bounds[1]}"
    assert minor(last) == f"{bounds[2]}.{int(bounds[3]) - 1}"


def test_images_and_commands_name_the_release_that_runs_in_the_tests() -> None:
    first, _ = releases()
    images = named(r"vllm-openai:v([\d.]+\d)", "compose/Dockerfile", "compose/compose.yaml", "docs")
    assert images == {first}
    assert named(r"pip install '?vllm==([\d.]+\d)", "README.md", "docs") == {first}


def test_the_pages_of_vllm_name_both_releases() -> None:
    first, last = releases()
    for page in ("docs/vllm.md", "docs/vllm-plugin.md"):
        assert f"vLLM {minor(first)} and {minor(last)}" in (ROOT / page).read_text(), page
