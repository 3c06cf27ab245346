#!/bin/sh
# llguidance 1.9.1 (vLLM's `guidance` backend) refuses whole schemas for what zod 4.6.7 and Pydantic 2.14.4 write for everyday types, although
# these keys restrict no text: zod's `z.record(z.string(), …)` writes `propertyNames`, `z.string().startsWith(…)` a `format` named
# starts_with, and Pydantic's `bytes` one named binary. Pydantic's `dict[str, int]`, which means the same as zod's record, is read.
# xgrammar reads all of them.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet llguidance==1.9.1 pydantic==2.14.4
npm install --silent --no-audit --no-fund --prefix . zod@4.6.7
cat > schemas.mjs <<'EOF'
import { z } from "zod";
const models = { "z.record(z.string(), z.number())": z.record(z.string(), z.number()), 'z.string().startsWith("a")': z.string().startsWith("a") };
console.log(JSON.stringify(Object.entries(models).map(([name, model]) => [name, z.toJSONSchema(model)])));
EOF
cat > program.py <<'EOF'
import json, subprocess, sys

import llguidance, pydantic


class ByteTokens:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()))
schemas = json.loads(subprocess.run(["node", "schemas.mjs"], stdout=subprocess.PIPE, check=True).stdout)
schemas += [(str(kind), pydantic.TypeAdapter(kind).json_schema()) for kind in (bytes, dict[str, int])]
found = []
for name, schema in schemas:
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_json_schema(schema))
    found.append(matcher.get_error().splitlines()[0] if matcher.is_error() else "read")
    schema.pop("$schema", None)
    print(f"{name}\n    {json.dumps(schema)}\n    {found[-1]}")
same = found == ['Unimplemented keys: ["propertyNames"]', "Unknown format: starts_with", "Unknown format: binary", "read"]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
