"""An attached worker: what it uses, and which of its prompts it need not describe again."""

from dataclasses import dataclass, field

from kvmesh.bus.messages import Fetch, Offer
from kvmesh.kvbm.core.blocks.block import Space
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks
from kvmesh.prompt_delta.blocks import BlockHashes, BlockPromptCache

KEEPS_BLOCKS = 1 << 19  # of 32 bytes each


@dataclass(slots=True)
class AttachedWorker:
    """An attached worker."""

    number: int
    instance: str
    space: Space
    lock: str
    tickets: set[int] = field(default_factory=set)
    prompts: BlockPromptCache = field(default_factory=lambda: BlockPromptCache(KEEPS_BLOCKS))

    def prompt(self, message: Offer | Fetch) -> PromptBlocks | None:
        """All of what a message describes, or None if its base is not known.

        Raises ValueError if its parts do not belong together.
        """
        rest = BlockHashes(message.digests, message.sequence_hashes, message.local)
        whole = self.prompts.complete(message.base, message.shared, rest)
        if whole is None:
            return None
        prompt = PromptBlocks.of(message, whole, self.space)
        self.prompts.store(whole, message.base)
        return prompt
