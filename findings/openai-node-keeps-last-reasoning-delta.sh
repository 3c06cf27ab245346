#!/bin/sh
# openai for Node.js 7.59.0 accumulates a chat stream by overwriting the fields that it does not know: of `reasoning_content`, which vLLM,
# SGLang and DeepSeek send in many deltas, `finalChatCompletion()` has the last one only. openai for Python 3.57.0 joins them.
# A program that returns the final message in a tool loop returns a few letters as the model's thinking.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openai==3.57.0
npm install --silent --no-audit --no-fund --prefix . openai@7.59.0
cat > run.mjs <<'EOF'
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const stream = client.chat.completions.stream({ model: "m", messages: [{ role: "user", content: "Go" }] });
const { content, reasoning_content } = (await stream.finalChatCompletion()).choices[0].message;
console.log(JSON.stringify([reasoning_content, content]));
EOF
cat > program.py <<'EOF'
import json, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI

DELTAS = [{"role": "assistant", "reasoning_content": "First "}, {"reasoning_content": "I look, "},
          {"reasoning_content": "then I answer."}, {"content": "It is "}, {"content": "done."}]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta, finish in [*((delta, None) for delta in DELTAS), ({}, "stop")]:
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
                     "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
node = json.loads(subprocess.run(["node", "run.mjs", url], stdout=subprocess.PIPE, check=True, timeout=60).stdout)
with OpenAI(base_url=url, api_key="none").chat.completions.stream(model="m", messages=[{"role": "user", "content": "Go"}]) as stream:
    stream.until_done()
    message = stream.get_final_completion().choices[0].message
python = [message.reasoning_content, message.content]
print(f"Node.js: reasoning_content {node[0]!r}, content {node[1]!r}")
print(f"Python:  reasoning_content {python[0]!r}, content {python[1]!r}")
same = node == ["then I answer.", "It is done."] and python == ["First I look, then I answer.", "It is done."]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
