"""The models of the mesh that this machine has."""

import time

import msgspec

from kvmesh.cli.arguments import failed
from kvmesh.runtime.quantities import duration, size
from kvmesh.settings import Settings
from kvmesh.weights.errors import ModelStoreError
from kvmesh.weights.models.cache import ModelCache
from kvmesh.weights.models.reference import parse_reference


def cache_of(settings: Settings) -> ModelCache:
    """The models of this machine, by the settings."""
    return ModelCache(settings.weights.models_directory, settings.weights.models_bytes)


def show(settings: Settings, as_json: bool) -> int:
    """Print the models of this machine, the least recently used first."""
    models = cache_of(settings).list()
    if as_json:
        print(msgspec.json.encode([model._asdict() for model in models]).decode())
        return 0
    for model in models:
        used = duration(max(time.time() - model.used_at, 0.0))
        print(f"{model.reference}  {size(model.size)}  used {used} ago")
    if not models:
        print("no models of the mesh on this machine")
    return 0


def remove(settings: Settings, text: str) -> int:
    """Remove one model from this machine; raises ModelStoreError."""
    reference, cache = parse_reference(text), cache_of(settings)
    found = [
        model
        for model in cache.list()
        if model.reference.rpartition("@")[0] == reference.name
        and model.digest.startswith(reference.digest)
    ]
    if len(found) != 1:
        known = ", ".join(model.reference for model in found)
        raise ModelStoreError(
            f"{text} may be {known}" if found else f"this machine has no model {text}"
        )
    if not cache.evict(found[0].digest):
        return failed("model", f"a process uses {found[0].reference}")
    print(f"removed {found[0].reference} from this machine: {size(found[0].size)}")
    return 0
