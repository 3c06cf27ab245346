#!/bin/sh
# `max_tokens` given to a call of llama-index's `OpenAILike` (llama-index-llms-openai-like 0.8.1, llama-index-llms-openai 0.8.3) is lost if
# the object has one too: the request carries the object's limit. A short title costs a whole answer; a long answer is cut.
# Without a limit of the object, the call's is sent; a call's `temperature` is always sent.
# Observed in December 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet llama-index-core==0.14.25 llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1
cat > program.py <<'EOF'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

sent = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        sent.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = {"role": "assistant", "content": "Hi"}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                  "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
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
for limit in (1500, None):
    model = OpenAILike(model="m", api_base=f"http://127.0.0.1:{server.server_port}/v1", api_key="none",
                       is_chat_model=True, max_tokens=limit)
    model.chat([ChatMessage(role="user", content="A title?")], max_tokens=9, temperature=0.5)
    body = sent[-1]
    print(f"object {limit}, call 9: sent {body.get('max_tokens')}, temperature {body['temperature']}")
sys.exit([(body.get("max_tokens"), body["temperature"]) for body in sent] != [(1500, 0.5), (9, 0.5)])
EOF
venv/bin/python program.py
