#!/bin/sh
# The OpenAI API gives a message with tool calls the content null, and templates test for it: those of DeepSeek's R1 distillations write
# calls only if `message['content'] is none`. transformers 5.24.0 removes keys whose value is None before it renders, and what is
# missing is not none: the same conversation fails, or the calls vanish from the prompt. The template itself renders it in Jinja.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0 jinja2==3.1.6
cat > program.py <<'EOF'
import sys

import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

WRITES_CALLS = "{%- if m.content is none %}<calls>{{ m.tool_calls[0].function.name }}</calls>{% endif %}"
WRITES_TEXT = "{%- if m.content is not none %}{{ m['content'] + '' }}{% endif %}"
TEMPLATES = {
    "calls where content is none, else content": "{% for m in messages %}" + WRITES_CALLS + WRITES_TEXT + "{% endfor %}",
    "calls where content is none": "{% for m in messages %}" + WRITES_CALLS + "{% endfor %}",
}
call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {}}}
messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
found = []
for name, template in TEMPLATES.items():
    by_jinja = jinja2.Template(template).render(messages=messages)
    try:
        by_transformers = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except jinja2.UndefinedError as error:
        by_transformers = f"error: {error}"
    found.append((by_jinja, by_transformers))
    print(f"{name}: Jinja {by_jinja!r}, transformers {by_transformers!r}")
same = "<calls>look</calls>" in found[0][0] and found[0][1].startswith("error") and found[1] == ("<calls>look</calls>", "")
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
