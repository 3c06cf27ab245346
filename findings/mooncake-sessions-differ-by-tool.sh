#!/bin/sh
# Three tools read one Mooncake file, whose rows state a session's growing prompts, in three ways. Dynamo 1.6.1 sends the prompts as they are
# recorded, each as long after the end of the one before as their times are apart. AIPerf 0.13.0 takes each row for the new message of a conversation
# and sends all rows and answers before it as well, at the recorded times. GuideLLM 0.8.1 ignores the session and reads the times as seconds, not
# milliseconds: the third request is due after 33 minutes, not 2 seconds. None of them warns.
# The script runs the readers of GuideLLM and Dynamo, and AIPerf as a whole. Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for tool in aiperf guidellm ai-dynamo; do
    python3 -m venv "$tool"
done
aiperf/bin/pip install --quiet aiperf==0.13.0
guidellm/bin/pip install --quiet guidellm==0.8.1
ai-dynamo/bin/pip install --quiet --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
ai-dynamo/bin/pip install --quiet pydantic uvloop
cat > read_guidellm.py <<'EOF'
import json

from guidellm.data.deserializers.deserializer import DatasetDeserializerFactory
from guidellm.schemas.data.deserializers import MooncakeTraceFormatArgs
from transformers import AutoTokenizer

arguments = MooncakeTraceFormatArgs(kind="mooncake", source={"kind": "json_file", "path": "trace.jsonl"})
tokenizer = AutoTokenizer.from_pretrained("./tokenizer")
rows = DatasetDeserializerFactory.deserialize(config=arguments, processor_factory=lambda: tokenizer, random_seed=1)
sent = []
for row in rows:
    turns = json.loads(row["conversation_turns"])["turns"]
    sent += [(turn["columns"]["relative_timestamp_column"][0], len(turn["columns"]["text_column"][0]), len(turns)) for turn in turns]
print("FOUND", json.dumps(sent))
EOF
cat > read_dynamo.py <<'EOF'
import json

from dynamo.replay.api import run_trace_replay

report = run_trace_replay(["trace.jsonl"], trace_format="mooncake", trace_block_size=512, num_workers=1, capture_per_request=True)
rows, ended, sent = sorted(report.per_request, key=lambda row: row["arrival_time_ms"]), 0.0, []
for row in rows:
    sent.append((round((row["arrival_time_ms"] - ended) / 1e3, 3), row["input_length"]))
    ended = row["terminal_time_ms"]
print("FOUND", json.dumps(sent))
EOF
cat > program.py <<'EOF'
import json, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sent = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        sent.append((time.monotonic(), sum(len(message["content"]) for message in body["messages"])))
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                  "choices": [{"index": 0, "message": {"role": "assistant", "content": "a" * 16}, "finish_reason": "length"}],
                  "usage": {"prompt_tokens": sent[-1][1], "completion_tokens": 16, "total_tokens": sent[-1][1] + 16}}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def read(tool, program):
    done = subprocess.run([f"{tool}/bin/python", program], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return [tuple(row) for row in json.loads(line[6:])]


# A token is a letter.
letters = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="!").save_pretrained("tokenizer")
recorded = [{"session_id": "s", "timestamp": 1000 * n, "input_length": 512 * (n + 2), "output_length": 16, "hash_ids": list(range(n + 2))}
            for n in range(3)]
with open("trace.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in recorded)
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
subprocess.run(["aiperf/bin/aiperf", "profile", "--model", "m", "--url", f"http://127.0.0.1:{server.server_port}", "--endpoint-type", "chat",
                "--tokenizer", "./tokenizer", "--ui-type", "none", "--input-file", "trace.jsonl", "--custom-dataset-type", "mooncake_trace",
                "--fixed-schedule"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
dynamo, guidellm = read("ai-dynamo", "read_dynamo.py"), read("guidellm", "read_guidellm.py")
aiperf = [(round(at - sent[0][0], 1), tokens) for at, tokens in sent]
print("recorded:", [(row["timestamp"], row["input_length"]) for row in recorded], "(ms, tokens)")
print("Dynamo:  ", dynamo, "(s after the end of the one before, tokens)")
print("AIPerf:  ", aiperf, "(s, tokens)")
print("GuideLLM:", guidellm, "(s, tokens, turns of the conversation)")
same = (
    dynamo == [(0, 1024), (1, 1536), (1, 2048)]
    and [(round(at), tokens) for at, tokens in aiperf] == [(0, 1024), (1, 1024 + 16 + 1536), (2, 1024 + 16 + 1536 + 16 + 2048)]
    and guidellm == [(0, 1024, 1), (1000, 1536, 1), (2000, 2048, 1)]
)
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
aiperf/bin/python program.py
