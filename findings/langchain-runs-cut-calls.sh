#!/bin/sh
# A model's answer ends at `max_tokens` inside the arguments of a tool call. langchain 1.5.2 (langchain-openai 1.7.4, langchain-anthropic
# 1.7.10) does not run such a call if the answer came whole: it is in `invalid_tool_calls`. If the answer was streamed, the JSON is closed
# where it broke off, and the agent runs the tool with the part: here it writes half a file and reports success.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet langchain==1.5.2 langchain-openai==1.7.4 langchain-anthropic==1.7.10
cat > program.py <<'EOF'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

CUT = '{"path": "notes.txt", "text": "first line, and then the sec'
PIECES = [CUT[i : i + 9] for i in range(0, len(CUT), 9)]
ran = []


def chat(stream):
    function = {"name": "write", "arguments": "" if stream else CUT}
    message = {"role": "assistant", "content": None,
               "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}
    if not stream:
        yield {"id": "c", "object": "chat.completion", "created": 1, "model": "m",
               "choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
        return
    parts = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in PIECES]
    for delta, finish in [(message, None), *((part, None) for part in parts), ({}, "length")]:
        yield {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
               "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def messages():
    yield {"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m",
           "content": [], "stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 1}}}
    yield {"type": "content_block_start", "index": 0,
           "content_block": {"type": "tool_use", "id": "toolu_1", "name": "write", "input": {}}}
    for piece in PIECES:
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": piece}}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stream = bool(body.get("stream"))
        events = list(messages() if "/messages" in self.path else chat(stream))
        lines = [(f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n" for event in events]
        data = ("".join(lines) if stream else json.dumps(events[0])).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if stream else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@tool
def write(path: str, text: str) -> str:
    """Write a file."""
    ran.append({"path": path, "text": text})
    return "written"


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
models = {
    "ChatOpenAI, whole": ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none"),
    "ChatOpenAI, streaming": ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none", streaming=True),
    "ChatAnthropic, streaming": ChatAnthropic(model="m", base_url=url, api_key="none", streaming=True),
}
found = []
print(f"the model wrote {CUT}")
for name, model in models.items():
    ran.clear()
    for step in create_agent(model, [write]).stream({"messages": [("user", "Go")]}, stream_mode="updates"):
        if "tools" in step or not step.get("model", {}).get("messages", [None])[0].tool_calls:
            break
    found.append([*ran])
    print(f"{name}: the agent ran write with {ran or 'nothing'}")
part = [json.loads(CUT + '"}')]
same = found == [[], part, part]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
