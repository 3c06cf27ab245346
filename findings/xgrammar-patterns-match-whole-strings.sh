#!/bin/sh
# In JSON Schema a `pattern` is searched in the string; Pydantic's `Field(pattern="^src/")` accepts "src/main.py". xgrammar 0.2.8, the default
# of vLLM and SGLang, takes it for the whole string: a model that is held to this schema can write nothing but "src/". llguidance 1.9.1
# reads it as a search. zod is not concerned: it writes `^src\/.*`.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet llguidance==1.9.1 pydantic==2.14.4 apache-tvm-ffi==0.1.15.post2 numpy==2.3.5
venv/bin/pip install --quiet --no-deps xgrammar==0.2.8
cat > program.py <<'EOF'
import json, sys
from unittest.mock import MagicMock

import llguidance, pydantic, tvm_ffi

# xgrammar imports these; grammars need neither
sys.modules.update(torch=MagicMock(), transformers=MagicMock())
import xgrammar

BYTES, END = [bytes([i]) for i in range(256)], 256


class File(pydantic.BaseModel):
    path: str = pydantic.Field(pattern="^src/")


class ByteTokens:
    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, [*BYTES, b"<end>"], [END]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


def by_xgrammar(schema, text):
    vocabulary = xgrammar.TokenizerInfo([*BYTES, b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[END])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(vocabulary).compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def by_llguidance(schema, text):
    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()))
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


schema, found = File.model_json_schema(), []
print(json.dumps(schema["properties"]["path"]))
for path in ("src/main.py", "src/"):
    text = json.dumps({"path": path})
    File.model_validate_json(text)
    found.append((by_xgrammar(schema, text), by_llguidance(schema, text)))
    print(f"{text} is valid; xgrammar lets a model write it: {found[-1][0]}, llguidance: {found[-1][1]}")
same = found == [(False, True), (True, True)]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
