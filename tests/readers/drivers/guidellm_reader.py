"""Reads a file with GuideLLM's Mooncake traces, and prints the requests that it would send."""

import json
import sys
from typing import Any

from guidellm.data.deserializers.deserializer import DatasetDeserializerFactory
from guidellm.schemas.data.deserializers import MooncakeTraceFormatArgs
from transformers import AutoTokenizer


def main(file: str, model: str, block_size: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    arguments: Any = MooncakeTraceFormatArgs.model_validate(
        {
            "kind": "mooncake",
            "source": {"kind": "json_file", "path": file},
            "hash_id_block_size": block_size,
        }
    )
    dataset: Any = DatasetDeserializerFactory.deserialize(
        config=arguments, processor_factory=lambda: tokenizer, random_seed=1
    )
    for row in dataset:
        for turn in json.loads(row["conversation_turns"])["turns"]:
            columns = turn["columns"]
            (text,) = columns["text_column"]
            print(json.dumps({
                "tokens": columns["prompt_tokens_count_column"][0],
                "text": text,
                "output": columns["output_tokens_count_column"][0],
                "timestamp": columns["relative_timestamp_column"][0] * 1e3,
            }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
