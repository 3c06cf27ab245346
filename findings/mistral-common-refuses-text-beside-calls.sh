#!/bin/sh
# A model often says a sentence and then calls a tool, and OpenAI's clients return both in one message. mistral-common 1.13.1, which vLLM
# uses for Mistral's own tokenizer files, refuses that message for v3 tokenizers (Mistral Nemo, Pixtral); for v7 it writes both. All
# of them refuse call ids of any other form than nine letters and digits, so a session that another server began (`call_…`)
# cannot go on.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'mistral-common[sentencepiece]==1.13.1'
cat > program.py <<'EOF'
import os, sys

import mistral_common
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

folder = os.path.join(os.path.dirname(mistral_common.__file__), "data")
files = {"v3": "tekken_240911.json", "v7": "mistral_instruct_tokenizer_241114.model.v7"}
parameters = {"type": "object", "properties": {}}
tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}]
found = {}
for version, file in files.items():
    tokenizer = MistralTokenizer.from_file(os.path.join(folder, file))
    for name, text, call_id in (("call", None, "abc123def"), ("text and call", "I look.", "abc123def"), ("OpenAI's id", None, "call_abc123")):
        call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": text, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": call_id, "name": "look", "content": "seen"}]
        try:
            tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(messages, tools=tools))
            found[version, name] = "written"
        except MistralCommonException as error:
            found[version, name] = f"refused: {error}"
        print(f"{version}, {name}: {found[version, name]}")
same = [text.partition(":")[0] for text in found.values()] == ["written", "refused", "refused", "written", "written", "refused"]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
