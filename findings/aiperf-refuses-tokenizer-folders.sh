#!/bin/sh
# AIPerf 0.13.0 takes a folder for `--tokenizer`, but not offline: with `HF_HUB_OFFLINE` set it reads the path as a repository's name. It sets that
# itself in the processes that write the prompts of a trace with `hash_ids`, from ten prompts on: a trace of nine is replayed, one of ten ends with
# `BrokenProcessPool`, on a machine with a network too. A folder that is laid out as an entry of the hub's cache is read in both cases.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet aiperf==0.13.0
cat > program.py <<'EOF'
import json, os, re, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                  "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "length"}],
                  "usage": {"prompt_tokens": 1000, "completion_tokens": 5, "total_tokens": 1005}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def trace(rows):
    name = f"{rows}.jsonl"
    lines = [{"timestamp": 20 * n, "input_length": 1000, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(rows)]
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--input-file", name, "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]


letters = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="!").save_pretrained("tokenizer")
entry = Path("hub/models--local--m")
(entry / "refs").mkdir(parents=True)
(entry / "refs" / "main").write_text("main")
(entry / "snapshots").mkdir()
(entry / "snapshots" / "main").symlink_to(Path("tokenizer").absolute())
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
online = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
offline = online | {"HF_HUB_OFFLINE": "1"}
synthetic = ["--request-count", "2", "--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "5"]
cases = [
    ("folder, synthetic prompts", "./tokenizer", online, synthetic),
    ("folder, synthetic prompts, HF_HUB_OFFLINE=1", "./tokenizer", offline, synthetic),
    ("folder, trace of 9 prompts", "./tokenizer", online, trace(9)),
    ("folder, trace of 10 prompts", "./tokenizer", online, trace(10)),
    ("entry of a cache, trace of 10 prompts, HF_HUB_OFFLINE=1", "local/m", offline | {"HF_HUB_CACHE": str(Path("hub").absolute())}, trace(10)),
]
found = []
for n, (name, tokenizer, environment, arguments) in enumerate(cases):
    command = ["venv/bin/aiperf", "profile", "--model", "m", "--url", f"http://127.0.0.1:{server.server_port}", "--endpoint-type", "chat",
               "--tokenizer", tokenizer, "--ui-type", "none", "--output-artifact-dir", f"out{n}", *arguments]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    causes = sorted(set(re.findall(r"HFValidationError: Repo id must|BrokenProcessPool", done.stdout + done.stderr)))
    found.append((done.returncode, causes))
    print(f"{name}: exit {done.returncode}", *causes)
refused = "HFValidationError: Repo id must"
same = found == [(0, []), (1, [refused]), (0, []), (1, ["BrokenProcessPool", refused]), (0, [])]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
