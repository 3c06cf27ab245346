#!/bin/sh
# mistral-common 1.13.1 writes the system text and the tools of its v3 tokenizers (Mistral Nemo, Pixtral, Mistral 7B v0.3) into the *last* user
# message. With each new user message they move on: the prompt of a turn is no prefix of the next one's, which differs from the first
# user message on. A prefix cache keeps a few tokens of a conversation, however long its instructions and tools are.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet mistral-common==1.13.1
cat > program.py <<'EOF'
import os, sys

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

file = os.path.join(os.path.dirname(mistral_common.__file__), "data", "tekken_240911.json")
tokenizer = MistralTokenizer.from_file(file)
system = {"role": "system", "content": "You review code. " + "Name each fault with its line. " * 100}
parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": parameters}}]
conversation = [system, {"role": "user", "content": "Review this."}]
prompts = []
for question in ("And the tests?", "And the docs?"):
    prompts.append(tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(conversation, tools=tools)).tokens)
    conversation += [{"role": "assistant", "content": "It is fine."}, {"role": "user", "content": question}]
first, second = prompts
shared = next(n for n, (a, b) in enumerate(zip(first, second)) if a != b)
print(f"the first turn's prompt has {len(first)} tokens, the second's {len(second)}; the first {shared} are the same")
same = len(first) > 500 and shared <= 3
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
