"""Memory layout of the KV of one block."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from msgspec import Struct


class LayerLayout(Struct, frozen=True, array_like=True):
    """The KV of one token in one attention layer."""

    heads: int
    key_size: int
    value_size: int


class KvLayout(Struct, frozen=True, kw_only=True):
    """Layout of a block: layer by layer, keys then values, each [block_size, heads, size].

    `weights` is a fingerprint of the model: KV is valid only for the weights that computed it.
    """

    weights: str
    dtype: str
    item_bytes: int
    block_size: int
    layers: list[LayerLayout]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        values = sum(layer.heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return values * self.block_size * self.item_bytes

    @property
    def summary(self) -> str:
        """Description of the whole layout, equal only for equal layouts."""
        runs = ((layer, len(list(same))) for layer, same in groupby(self.layers))
        layers = ", ".join(
            f"{count} layers of {layer.heads} heads of {layer.key_size}+{layer.value_size}"
            for layer, count in runs
        )
        item = f"{self.dtype} of {self.item_bytes} bytes"
        return f"{item}, {self.block_size} tokens a block, {layers}, weights {self.weights}"


def incompatible_models(
    ours: Mapping[str, Sequence[str]], theirs: Mapping[str, Sequence[str]]
) -> list[str]:
    """Models of which both nodes have layouts (as summaries), none of them the same."""
    return [
        model
        for model, layouts in ours.items()
        if layouts and theirs.get(model) and set(layouts).isdisjoint(theirs[model])
    ]
