#!/bin/sh
# The tool runners of anthropic 2.14.0 (Python) and @anthropic-ai/sdk 1.14.0 (Node.js) add `thread` to each request, which nobody asked for.
# A server that ignores fields it does not know gets the tool's result alone in the second request, without the question and the call; its
# model answers something else, and nothing fails. A server that refuses unknown fields with the API's usual 400 ends the run. Only the
# code `thread_unsupported_request` in the error's details makes the runner send the whole history. `thread: false` switches it off.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet anthropic==2.14.0
npm install --silent --no-audit --no-fund --prefix . @anthropic-ai/sdk@1.14.0 zod@4.6.7
cat > run.mjs <<'EOF'
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
const look = betaZodTool({ name: "look", description: "Look.", inputSchema: z.object({}), run: async () => "seen" });
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Go" }];
await client.beta.messages.toolRunner({ model: "m", max_tokens: 9, messages, tools: [look] }).runUntilDone();
EOF
cat > program.py <<'EOF'
import json, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from anthropic import Anthropic, APIStatusError, beta_tool

seen, answer = [], ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        blocks = [b["type"] for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
        seen.append((body.get("thread", {}).get("type"), [m["role"] for m in body["messages"]]))
        block = {"type": "text", "text": "Done."} if "tool_result" in blocks else {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        reply = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [block],
                 "stop_reason": "tool_use" if block["type"] == "tool_use" else "end_turn", "usage": {"input_tokens": 1, "output_tokens": 1}}
        refused = "thread" in body and answer != "ignores it"
        if refused:
            error = {"type": "invalid_request_error", "message": "thread: Extra inputs are not permitted"}
            if answer == "names the code":
                error["details"] = {"error_code": "thread_unsupported_request"}
            reply = {"type": "error", "error": error}
        data = json.dumps(reply).encode()
        self.send_response(400 if refused else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@beta_tool
def look() -> str:
    """Look."""
    return "seen"


def python(url):
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "Go"}], tools=[look])
    try:
        runner.until_done()
    except APIStatusError:
        return False
    return True


def node(url):
    return subprocess.run(["node", "run.mjs", url], stderr=subprocess.DEVNULL, timeout=60).returncode == 0


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
WHOLE = ["user", "assistant", "user"]
EXPECTED = {
    "ignores it": (True, [("create", ["user"]), ("continue", ["user"])]),
    "answers 400": (False, [("create", ["user"])]),
    "names the code": (True, [("create", ["user"]), (None, ["user"]), (None, WHOLE)]),
}
same = True
for run in (python, node):
    for answer, expected in EXPECTED.items():
        seen.clear()
        done = run(f"http://127.0.0.1:{server.server_port}")
        same = same and (done, seen) == expected
        print(f"{run.__name__}, a server that {answer}: {'ended well' if done else 'failed'}; requests (thread, roles): {seen}")
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
