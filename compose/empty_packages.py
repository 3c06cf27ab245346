"""Makes, empty, what pyproject.toml names besides the native part, which is then built alone."""

import tomllib
from pathlib import Path

tree = tomllib.loads(Path("pyproject.toml").read_text())
for folder in tree["tool"]["scikit-build"]["wheel"]["packages"].values():
    Path(folder).mkdir(parents=True, exist_ok=True)
for file in (tree["project"]["readme"], *tree["project"]["license-files"]):
    Path(file).touch()
