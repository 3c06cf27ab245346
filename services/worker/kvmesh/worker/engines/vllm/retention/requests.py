"""A request in vLLM with its blocks and the claims that it makes on them."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from kvmesh.bus.messages import owner
from kvmesh.hashing import block_hashes
from kvmesh.retention.budget import directives
from kvmesh.retention.claims import DEFAULT_LEVEL, MAX_LEVEL, RetentionWish
from kvmesh.retention.token_ranges import RetentionSegment, segments, with_prefix
from kvmesh.worker.adapters.request_origin import RequestOrigin
from kvmesh.worker.enginecore.retention_request import PREFETCH_PRIORITY


class RetainedRequest:
    """Blocks and claims of one request, by KV cache group.

    `hashes` are vLLM's, which vLLM extends during generation; `sequence_hashes` are kvmesh's of the
    prompt. `shared` counts the leading hashes that other sessions use. `blocks` are block ids, 0
    for one outside a sliding window; the first `claimed` of them have been claimed. `copied` is the
    first index of a block that another one's content equals, by group. `ahead`: the prompt, or a
    part of it, is computed ahead of the session's next request.
    """

    def __init__(
        self,
        origin: RequestOrigin,
        hashes: list[bytes],
        tokens: "array[int]",
        group_sizes: Sequence[int],
        hash_size: int,
        defaults: Mapping[str, RetentionWish],
    ) -> None:
        self.id = origin.request
        self.salt = origin.salt
        self.tenant = origin.tenant
        self.payer = owner(origin.tenant)
        self.session = origin.session
        self.conversation = origin.conversation
        self.tentative = origin.tentative
        self.ahead = origin.priority == PREFETCH_PRIORITY
        self.hashes = hashes
        packed = block_hashes(tokens.tobytes(), hash_size, origin.salt)[1]
        self.sequence_hashes = array("Q", packed)
        self.shared = 0
        self.blocks: list[list[int]] = [[] for _ in group_sizes]
        self.claimed = [0] * len(group_sizes)
        self.copied: dict[int, int] = {}
        self.prompt_directives = directives(origin.retention, self.payer)
        decode = [] if origin.decode is None else [origin.decode]
        self.output_directives = directives(decode, self.payer)
        self.directives = self.prompt_directives + self.output_directives
        level = min(MAX_LEVEL, DEFAULT_LEVEL + origin.priority)
        self.raised = RetentionWish(level) if origin.priority > 0 else None
        prompt = origin.prompt_tokens
        self._per_block = [size // hash_size for size in group_sizes]
        self._segments = [
            with_prefix(segments(origin.retention, origin.decode, prompt, size, defaults))
            for size in group_sizes
        ]

    @property
    def is_plain(self) -> bool:
        """True if the request claims nothing."""
        return self.raised is None and not any(self._segments)

    def shared_blocks(self, group: int) -> int:
        """Leading blocks of a group that other sessions use."""
        return self.shared // self._per_block[group]

    def wishes(
        self, group: int, first: int, end: int
    ) -> Iterator[tuple[int, int, RetentionWish | None]]:
        """Divide blocks `first` to `end` of a group by wish: (start, stop, wish), in order."""
        ranges: list[RetentionSegment] = self._segments[group]
        at = first
        while at < end:
            index = bisect_right(ranges, at, key=lambda segment: segment.first) - 1
            wish, stop = None, end
            if index >= 0 and at < (ranges[index].end or at + 1):
                wish, stop = ranges[index].wish, ranges[index].end or end
            elif index + 1 < len(ranges):
                stop = ranges[index + 1].first
            yield at, min(stop, end), wish
            at = min(stop, end)
