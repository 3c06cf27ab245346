#!/bin/sh
# DeepSeek's own deepseek-recipe 0.2.0 writes a call without arguments in two forms: for V4 the call is two lines, for V4.1 an empty line stands
# between them. With arguments, both write the same lines. Code that renders both models' prompts alike differs
# from what one of them wrote by an empty line, and a prefix cache misses from there on.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet deepseek-recipe==0.2.0
cat > program.py <<'EOF'
import sys

from deepseek_recipe import AssistantMessage, Conversation, DeepseekV41Encoding, DeepseekV4Encoding, ToolCall, ToolDefinition, UserMessage

found = []
for encoding in (DeepseekV4Encoding(), DeepseekV41Encoding()):
    for arguments in ("{}", '{"a": 1}'):
        calls = [ToolCall("call_1", "look", arguments)]
        messages = [UserMessage("Go"), AssistantMessage("", "I look.", calls)]
        prompt = encoding.render_conversation(Conversation(messages, tools=[ToolDefinition("look")])).prompt
        lines = prompt.rpartition("I look.")[2].splitlines()
        start = next(n for n, line in enumerate(lines) if 'name="look"' in line)
        end = next(n for n, line in enumerate(lines) if line.endswith("invoke>"))
        found.append(lines[start + 1 : end])
        print(f"{type(encoding).__name__}, arguments {arguments}: {lines[start : end + 1]}")
same = [len(lines) for lines in found] == [0, 1, 1, 1] and found[2] == [""]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
