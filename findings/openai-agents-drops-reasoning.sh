#!/bin/sh
# openai-agents 0.24.0 over chat completions does not return `reasoning_content` with the calls of a model, unless the model's
# name contains "deepseek" or `should_replay_reasoning_content` says so. In the next turn of a tool loop the model has lost its
# plan, and a cache that matches prompts token by token misses the answer.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openai-agents==0.24.0
cat > program.py <<'EOF'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

returned = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answers = [m for m in body["messages"] if m["role"] == "assistant"]
        message, finish = {"role": "assistant", "content": "Done."}, "stop"
        if answers:
            returned.append(answers[0].get("reasoning_content"))
        else:
            call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            message = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]}
            finish = "tool_calls"
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"],
                  "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@function_tool
def look() -> str:
    """Look."""
    return "seen"


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
cases = [("some-model", {}), ("deepseek-x", {}), ("some-model", {"should_replay_reasoning_content": lambda _: True})]
for name, options in cases:
    agent = Agent(name="a", model=OpenAIChatCompletionsModel(name, client, **options), tools=[look])
    Runner.run_sync(agent, "Go")
    print(f"{name} {'with' if options else 'without'} the option: returned reasoning_content {returned[-1]!r}")
same = returned == [None, "I look.", "I look."]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
