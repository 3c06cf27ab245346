#!/bin/sh
# `pandas.read_json` 3.1.1 makes numbers of text that looks like them, though JSON has types: sessions "007" and "7" become one session 7, and names of
# twenty digits become floats, of which `to_json` writes nine, so that they all become one. `dtype=False` keeps the text, and so does one name in the
# column that is no number.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pandas==3.1.1 numpy==2.4.6
cat > program.py <<'EOF'
import json, sys
from pathlib import Path

import pandas


def through(name, sessions, **options):
    rows = [{"timestamp": n, "session_id": each} for n, each in enumerate(sessions)]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pandas.read_json(name, lines=True, **options).to_json(f"again-{name}", orient="records", lines=True)
    return [json.loads(line)["session_id"] for line in Path(f"again-{name}").read_text().splitlines()]


short, long, named = ["007", "7"], ["12345678901234567890", "12345678901234567891"], ["a7", "7"]
found = {
    "short": through("short.jsonl", short),
    "long": through("long.jsonl", long),
    "named": through("named.jsonl", named),
    "kept": through("kept.jsonl", short, dtype=False),
}
for name, sessions in found.items():
    print(f"{name}: {sessions}")
same = found == {"short": [7, 7], "long": [1.23456789e19, 1.23456789e19], "named": named, "kept": short}
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
