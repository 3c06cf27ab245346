"""Prints a project's requirements, one a line: of its build, or itself with some extras.

usage: requirements.py pyproject.toml build | requirements.py pyproject.toml [EXTRA …]
"""

import sys
import tomllib
from pathlib import Path

file, *extras = sys.argv[1:]
tree = tomllib.loads(Path(file).read_text())
if extras == ["build"]:
    found = [*tree["build-system"]["requires"], "cmake", "ninja"]
else:
    project = tree["project"]
    more = (line for extra in extras for line in project["optional-dependencies"][extra])
    found = [*project["dependencies"], *more]
print(*found, sep="\n")
