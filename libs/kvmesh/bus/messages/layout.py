"""Memory layout of the KV of one block."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from msgspec import Struct


class LayerLayout(Struct, frozen=True, array_like=True):
    """The KV of one token in one attention layer."""

    heads: int
    key_size: int
    value_size: int


class KvLayout(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Layout of a block: layer by layer, keys then values, each [block_size, heads, size].

    `weights` is a fingerprint of the model: KV is valid only for the weights that computed it.
    `engine` names the engine, its version and its device, if a block has their arrangement instead
    of the one above.

    An engine with several ranks or kinds of layers divides a block into `parts`, which are stored
    as blocks of their own. Part 0, the *lead*, stands for the block in KV events, cards and counts.
    A part with a `window`, in tokens, is of use without the blocks before the window.
    """

    weights: str
    dtype: str
    item_bytes: int
    block_size: int
    layers: list[LayerLayout]
    engine: str = ""
    part: int = 0
    parts: int = 1
    window: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers together."""
        values = sum(layer.heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return values * self.block_size * self.item_bytes

    @property
    def summary(self) -> str:
        """Description of the layout of this part, equal only for equal layouts."""
        runs = ((layer, len(list(same))) for layer, same in groupby(self.layers))
        layers = ", ".join(
            f"{count} layers of {layer.heads} heads of {layer.key_size}+{layer.value_size}"
            for layer, count in runs
        )
        item = f"{self.dtype} of {self.item_bytes} bytes"
        rest = f", computed by {self.engine}" if self.engine else ""
        rest += f", window of {self.window} tokens" if self.window else ""
        rest += f", part {self.part + 1} of {self.parts}" if self.parts > 1 else ""
        return f"{item}, {self.block_size} tokens a block, {layers}, weights {self.weights}{rest}"


def incompatible_models(
    ours: Mapping[str, Sequence[str]], theirs: Mapping[str, Sequence[str]]
) -> list[str]:
    """Models of which both nodes have layouts (as summaries), none of them the same."""
    return [
        model
        for model, layouts in ours.items()
        if layouts and theirs.get(model) and set(layouts).isdisjoint(theirs[model])
    ]
