"""Replays a file with Dynamo's offline simulation, and prints its requests."""

import json
import sys

from dynamo.replay.api import run_trace_replay


def main(file: str, trace_format: str, block_size: int) -> None:
    report = run_trace_replay(
        [file],
        trace_format=trace_format,
        execution_model="m" if trace_format == "agentic_mooncake" else None,
        trace_block_size=None if trace_format == "agentic_mooncake" else block_size,
        num_workers=1,
        capture_per_request=True,
    )
    for one in report.per_request:
        print(json.dumps({
            "request": one.get("request_id"),
            "session": one.get("session_id"),
            "tokens": one["input_length"],
            "output": one["output_length"],
            "timestamp": one["arrival_time_ms"],
            "end": one["terminal_time_ms"],
            "reused": one["reused_input_tokens"],
        }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
