"""Errors of weights on their way between workers."""


class WeightsError(Exception):
    """Weights cannot be described, stored or fetched; the message names the cause."""


class ManifestError(WeightsError):
    """A manifest is malformed, too large, or not authenticated by the mesh's key."""


class CheckpointError(WeightsError):
    """The files of a model folder cannot be read, or are no safetensors files."""


class StoreError(WeightsError):
    """The directory of stored copies cannot be used."""


class StoreFull(StoreError):
    """A copy does not fit into the directory, although all unused copies were removed."""


class WrongDigest(WeightsError):
    """The bytes of a chunk are not those that the manifest describes."""


class ModelStoreError(WeightsError):
    """A model cannot be found in the mesh, pushed or pulled."""


class WeightsLost(WeightsError):
    """Chunks of a stored copy do not arrive any more."""
