#!/bin/sh
# In a Weka trace (kv-cache-tester, AgentX), `in` and `hash_ids` of a request state its whole prompt, history included. GuideLLM 0.8.1 writes that
# whole prompt as the next message of the conversation, behind the messages and answers before: the third request here holds the first prompt three
# times, and 3968 tokens of 1920. In long sessions prompts grow with the square of the turns, and prefix caches look better than they are.
# Each turn also waits from the last answer for the whole time between the recorded starts, unless `duration_column` is set to `api_time`.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet guidellm==0.8.1
cat > program.py <<'EOF'
import json, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

API_TIME = 1.0
sent = []


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply("application/json", json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = [m["content"] if isinstance(m["content"], str) else "".join(part["text"] for part in m["content"]) for m in body["messages"]]
        sent.append((time.monotonic(), texts))
        time.sleep(API_TIME)
        prompt, answer = sum(map(len, texts)), body["max_completion_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        parts = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a" * answer}, "finish_reason": None}]},
                 {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
                 {"choices": [], "usage": usage}]
        lines = [json.dumps({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **part}) for part in parts]
        self.reply("text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))

    def reply(self, kind, text):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


# A token is a letter.
letters = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="!").save_pretrained("tokenizer")
recorded = [{"t": 3.0 * n, "type": "s", "model": "m", "in": 640 * (n + 1), "out": 64, "hash_ids": list(range(10 * (n + 1))),
             "api_time": API_TIME, "think_time": 2.0, "stop": "end_turn", "input_types": ["text"]} for n in range(3)]
with open("trace.jsonl", "w") as file:
    file.write(json.dumps({"id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": recorded}) + "\n")
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
backend = {"kind": "openai_http", "target": f"http://127.0.0.1:{server.server_port}", "model": "m", "request_format": "/v1/chat/completions"}
found = []
print("recorded:", [row["in"] for row in recorded], "tokens, starts 3 s apart")
for options in ({}, {"duration_column": "api_time"}):
    sent.clear()
    data = {"kind": "weka", "source": {"kind": "json_file", "path": "trace.jsonl"}, **options}
    subprocess.run(["venv/bin/guidellm", "run", "--backend", json.dumps(backend), "--tokenizer", "kind=huggingface_auto,model=./tokenizer",
                    "--data", json.dumps(data), "--profile", "kind=replay", "--output", "kind=json,path=report.json", "--disable-console"],
                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    prompts = [sum(map(len, texts)) for _, texts in sent]
    first, last = sent[0][1][0], sent[-1][1]
    copies = sum(text.startswith(first[:640]) for text in last)
    apart = [round(later - earlier) for (earlier, _), (later, _) in zip(sent, sent[1:])]
    found.append((prompts, copies, apart))
    print(f"sent with {options}: {prompts} tokens, the first prompt {copies} times in the third, starts {apart} s apart")
whole = [640, 640 + 64 + 1280, 640 + 64 + 1280 + 64 + 1920]
same = found == [(whole, 3, [4, 4]), (whole, 3, [3, 3])]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
