"""Reads a file with vLLM's timed traces, and prints the requests that it would send."""

import json
import sys
from typing import Any

from transformers import AutoTokenizer
from vllm.benchmarks.datasets.datasets import TimedTrace


def main(file: str, model: str, chunk: int) -> None:
    dataset: Any = TimedTrace(
        dataset_path=file,
        random_seed=0,
        timed_trace_chunk_hash_size=chunk,
        timed_trace_sec_multiplier=1.0,
        timed_trace_label_timestamp="timestamp",
        timed_trace_label_input_length="input_length",
        timed_trace_label_output_length="output_length",
        timed_trace_label_hash_ids="hash_ids",
    )
    for one in dataset.sample(AutoTokenizer.from_pretrained(model), 10**6):
        print(json.dumps({
            "tokens": one.prompt_len,
            "ids": one.prompt,
            "output": one.expected_output_len,
            "timestamp": one.timestamp * 1e3,
        }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
