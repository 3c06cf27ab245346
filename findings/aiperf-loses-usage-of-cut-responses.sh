#!/bin/sh
# AIPerf 0.13.0 reads the usage of a streamed answer of the Responses API from `response.completed` alone. An answer that ends at
# `max_output_tokens` ends with `response.incomplete`, whose usage AIPerf passes over. A load test that fixes the lengths of answers has only such
# ones: with `--use-server-token-count` AIPerf exits with 0, reports no error, and leaves out every count of tokens, their rate too.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet aiperf==0.13.0
cat > program.py <<'EOF'
import json, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = "hello"
COUNTS = ["usage_prompt_tokens", "usage_completion_tokens", "output_sequence_length", "output_token_throughput"]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        response = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress", "output": []}
        content = [{"type": "output_text", "text": TEXT, "annotations": []}]
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": end, "content": content}
        ended = response | {"status": end, "output": [message], "usage": {"input_tokens": 77, "output_tokens": 5, "total_tokens": 82}}
        if end == "incomplete":
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        events = [{"type": "response.created", "response": response},
                  *({"type": "response.output_text.delta", **place, "delta": letter} for letter in TEXT),
                  {"type": f"response.{end}", "response": ended}]
        lines = [f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': n})}\n\n" for n, event in enumerate(events)]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *_):
        pass


letters = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="!").save_pretrained("tokenizer")
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
found = []
for end in ("completed", "incomplete"):
    command = ["venv/bin/aiperf", "profile", "--model", "m", "--url", f"http://127.0.0.1:{server.server_port}", "--endpoint-type", "responses",
               "--streaming", "--use-server-token-count", "--tokenizer", "./tokenizer", "--request-count", "2", "--concurrency", "1",
               "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "5", "--ui-type", "none", "--output-artifact-dir", end]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
    with open(f"{end}/profile_export_aiperf.json") as file:
        report = json.load(file)
    counts = {name: report[name]["avg"] for name in COUNTS if name in report}
    found.append((code, report["request_count"]["avg"], len(report["error_summary"]), [*counts]))
    print(f"response.{end}: exit {code}, {report['request_count']['avg']:.0f} requests, {len(report['error_summary'])} errors, {counts or 'no counts'}")
same = found == [(0, 2, 0, COUNTS), (0, 2, 0, [])]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
