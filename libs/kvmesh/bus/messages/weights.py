"""Messages between workers that take weights from each other."""

from msgspec import Struct


class WeightQuery(Struct, frozen=True, omit_defaults=True):
    """Query for sources of the copy of weights with `digest`; all that have chunks hear it.

    Only those reply whose draw for `query` is at least `above` and below `share`, both in [0, 1]:
    the query is repeated with larger shares until enough have replied. `instance` asks.
    """

    digest: str
    query: str
    share: float = 1.0
    above: float = 0.0
    instance: str = ""


class WeightOffer(Struct, frozen=True, omit_defaults=True):
    """A source of a copy of weights, on `node`: descriptors of grants for its files, in order.

    Unless it is `complete`, `have` is the descriptor of a grant for one byte per chunk: 1 if it is
    there, 2 if it is on its way.
    """

    instance: str
    digest: str
    files: list[bytes]
    complete: bool = False
    have: bytes = b""
    node: str = ""
