"""Makes, empty, what the build names besides the native part, which is then built alone."""

import re
import tomllib
from pathlib import Path

tree = tomllib.loads(Path("pyproject.toml").read_text())
for folder in tree["tool"]["scikit-build"]["wheel"]["packages"].values():
    Path(folder).mkdir(parents=True, exist_ok=True)
listed = re.findall(r"install\(FILES (.+?) DESTINATION", Path("CMakeLists.txt").read_text(), re.S)
installed = " ".join(listed).split()
for file in (tree["project"]["readme"], *tree["project"]["license-files"], *installed):
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).touch()
