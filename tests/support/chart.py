"""The Helm chart, rendered; as a program it prints the kustomize base."""

from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "kubernetes" / "chart"
HEAD = "# `make kubernetes` writes this file: the chart with its own values.\n"
Manifest = dict[str, Any]


class _PlainDumper(yaml.SafeDumper):
    """Writes repeated parts in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def rendered(values: dict[str, Any] | None = None) -> list[Manifest]:
    """The manifests of the chart with these values beside its own."""
    import helm_python

    files = helm_python.Chart.load(CHART).render(values=values, name="kvmesh", namespace="kvmesh")
    manifests = [
        manifest
        for name in sorted(files)
        for manifest in yaml.safe_load_all(files[name])
        if manifest is not None
    ]
    return sorted(manifests, key=lambda each: (each["kind"], each["metadata"]["name"]))


def base() -> str:
    """The contents of the kustomize base."""
    return HEAD + yaml.dump_all(rendered(), Dumper=_PlainDumper, sort_keys=False, width=120)


if __name__ == "__main__":
    print(base(), end="")
