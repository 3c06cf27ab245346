#!/bin/sh
# Claude Code 2.1.332 returns tool calls in other words than the model wrote: an Edit gets `replace_all: false`,
# keys are in the order of its schema, numbers in texts become numbers, `cd CWD && ` is cut off commands.
# A server whose cache matches prompts token by token computes such a call again.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir home work
npm install --silent --no-audit --no-fund --prefix . --allow-scripts=@anthropic-ai/claude-code @anthropic-ai/claude-code@2.1.332 ||
    npm install --silent --no-audit --no-fund --prefix . @anthropic-ai/claude-code@2.1.332
printf 'one\ntwo\n' > work/notes.txt
cat > server.py <<'EOF'
import json, os, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORK = os.path.realpath("work")
FILE = f"{WORK}/notes.txt"
WROTE = [
    ("Read", {"file_path": FILE}),
    ("Edit", {"new_string": "three", "old_string": "two", "file_path": FILE}),
    ("Bash", {"description": "Count", "command": f"cd {WORK} && wc -l notes.txt", "timeout": "5000"}),
]
EXPECTED = [
    {"file_path": FILE},
    {"replace_all": False, "file_path": FILE, "old_string": "two", "new_string": "three"},
    {"command": "wc -l notes.txt", "description": "Count", "timeout": 5000},
]
returned = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        calls = [b for m in body["messages"] if m["role"] == "assistant" and isinstance(m["content"], list)
                 for b in m["content"] if b["type"] == "tool_use"]
        returned[:] = [call["input"] for call in calls]
        events = [("message_start", {"message": {"id": "msg_1", "type": "message", "role": "assistant",
                   "model": "m", "content": [], "stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 1}}})]
        if len(calls) < len(WROTE) and body.get("tools"):
            name, given = WROTE[len(calls)]
            block = {"type": "tool_use", "id": f"toolu_{len(calls)}", "name": name, "input": {}}
            delta, stop = {"type": "input_json_delta", "partial_json": json.dumps(given)}, "tool_use"
        else:
            block, delta, stop = {"type": "text", "text": ""}, {"type": "text_delta", "text": "Done."}, "end_turn"
        events += [("content_block_start", {"index": 0, "content_block": block}),
                   ("content_block_delta", {"index": 0, "delta": delta}), ("content_block_stop", {"index": 0}),
                   ("message_delta", {"delta": {"stop_reason": stop}, "usage": {"output_tokens": 1}}), ("message_stop", {})]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for name, data in events:
            self.wfile.write(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
env = {"PATH": os.environ["PATH"], "HOME": os.path.realpath("home"), "ANTHROPIC_API_KEY": "none",
       "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{server.server_port}", "DISABLE_AUTOUPDATER": "1",
       "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1"}
claude = os.path.realpath("node_modules/.bin/claude")
tools = ["--allowedTools", "Read,Edit,Bash"]
subprocess.run([claude, "-p", "Go", *tools], cwd=WORK, env=env, stdin=subprocess.DEVNULL, timeout=120)
same = [json.dumps(a) == json.dumps(b) for a, b in zip(returned, EXPECTED)] == [True] * len(EXPECTED)
for (name, wrote), back in zip(WROTE, returned):
    print(f"{name}: model wrote {json.dumps(wrote)}\n      returned   {json.dumps(back)}".replace(WORK, "CWD"))
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
python3 server.py
