#!/bin/sh
# openai 3.57.0 (Python) describes the output of `responses.compact` as "a list of all user messages, followed by a single
# compaction item", and types it as output of a model. Who passes it on as `input`, as the output is meant to be used, gets a
# warning of Pydantic, an exception where warnings are errors; what is sent is right.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openai==3.57.0
cat > program.py <<'EOF'
import json, sys, threading, warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI

SAID = {"type": "message", "id": "msg_1", "status": "completed", "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}]}
SUMMARY = {"type": "compaction", "id": "cmp_1", "encrypted_content": "opaque"}
USAGE = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 1,
         "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2}
sent = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        sent.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["input"])
        answer = {"id": "resp_1", "object": "response.compaction", "created_at": 1, "output": [SAID, SUMMARY], "usage": USAGE}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
compacted = client.responses.compact(model="m", input="Hi")
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    client.responses.create(model="m", input=compacted.output)
print("sent:", json.dumps(sent[-1]))
print("warnings:", [str(each.message).splitlines()[1].strip()[:100] for each in found])
same = sent[-1][0]["content"] == SAID["content"] and any("output_text" in str(each.message) for each in found)
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
