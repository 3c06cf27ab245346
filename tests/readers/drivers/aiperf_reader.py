"""Reads a file with AIPerf's own loader, and prints the requests that it would send."""

import json
import sys
from typing import Any

from aiperf.common import random_generator
from aiperf.common.tokenizer import Tokenizer
from aiperf.dataset.generator.prompt import PromptGenerator
from aiperf.dataset.loader import hash_ids_synthesis, mooncake_trace


def main(file: str, model: str, block_size: int) -> None:
    random_generator.init(1)
    tokenizer = Tokenizer.from_pretrained(model)
    # AIPerf's processes do not load a tokenizer from a folder: decode here.
    hash_ids_synthesis.parallel_decode = lambda parts, *_, **__: list(map(tokenizer.decode, parts))
    loader: Any = mooncake_trace.MooncakeTraceDatasetLoader(
        filename=file,
        prompt_generator=PromptGenerator(prompts=None, prefix_prompts=None, tokenizer=tokenizer),
        default_block_size=block_size,
    )
    for conversation in loader.convert_to_conversations(loader.load_dataset()):
        for turn in conversation.turns:
            (text,) = turn.texts[0].contents
            print(json.dumps({
                "session": conversation.session_id,
                "tokens": len(tokenizer.encode(text)),
                "text": text,
                "output": turn.max_tokens,
                "timestamp": turn.timestamp,
                "delay": turn.delay,
            }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
