#!/bin/sh
# xgrammar 0.2.8 follows a `$ref` through objects with plain keys only. It refuses one through a list (`#/properties/a/anyOf/0`) and one with
# an escaped key (`#/$defs/a~1b`), both of which JSON Pointer knows and llguidance 1.9.1 reads. What stands beside a `$ref`, such as
# a `maxLength`, it ignores without a word, and a model may write longer texts; llguidance does not.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet llguidance==1.9.1 apache-tvm-ffi==0.1.15.post2 numpy==2.3.5 pydantic==2.14.4
venv/bin/pip install --quiet --no-deps xgrammar==0.2.8
cat > program.py <<'EOF'
import json, sys
from unittest.mock import MagicMock

import llguidance, tvm_ffi

# xgrammar imports these; grammars need neither
sys.modules.update(torch=MagicMock(), transformers=MagicMock())
import xgrammar

BYTES, END = [bytes([i]) for i in range(256)], 256


class ByteTokens:
    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, [*BYTES, b"<end>"], [END]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


def by_xgrammar(schema, text):
    vocabulary = xgrammar.TokenizerInfo([*BYTES, b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[END])
    try:
        compiled = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(json.dumps(schema))
    except Exception:
        return "refused"
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def by_llguidance(schema, text):
    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()))
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema))
    if matcher.is_error():
        return "refused"
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def fields(properties, **more):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False, **more}


number = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
defined = {"$defs": {"a/b": {"type": "integer"}, "word": {"type": "string"}}}
cases = [
    ("an item of a list", fields({"a": number, "b": {"$ref": "#/properties/a/anyOf/0"}}), {"a": 1, "b": 2}, ("refused", True)),
    ("a key with a slash", fields({"a": {"$ref": "#/$defs/a~1b"}}, **defined), {"a": 1}, ("refused", True)),
    ("a valid text beside maxLength 2", fields({"a": {"$ref": "#/$defs/word", "maxLength": 2}}, **defined), {"a": "no"}, (True, True)),
    ("one that is too long", fields({"a": {"$ref": "#/$defs/word", "maxLength": 2}}, **defined), {"a": "long"}, (True, False)),
]
same = True
for name, schema, value, expected in cases:
    found = by_xgrammar(schema, json.dumps(value)), by_llguidance(schema, json.dumps(value))
    same = same and found == expected
    print(f"{name}: may a model write {json.dumps(value)}? xgrammar {found[0]}, llguidance {found[1]}")
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
