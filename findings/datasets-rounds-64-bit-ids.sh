#!/bin/sh
# The `datasets` library 5.2.0 reads JSON integers from 2^63 on as floats, and without a word: a column of 64-bit block hashes becomes `float64` as soon
# as one of them has its highest bit, and all ids of the file lose their last digits. `to_json` then writes ten digits, so that different blocks have
# one id and prompts share what they do not share. Hashes below 2^63 stay exact. Text keeps all of them, as does pandas 3.1.1.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pandas==3.1.1 numpy==2.4.6
cat > program.py <<'EOF'
import json, sys, warnings
from pathlib import Path

import datasets
import pandas

datasets.disable_progress_bars()
warnings.simplefilter("error", UserWarning)  # a warning would be a change
HALF = 1 << 63


def through(name, ids):
    """The type of the ids, and the ids that `to_json` writes."""
    rows = [{"timestamp": 1000 * n, "input_length": 1024, "output_length": 5, "hash_ids": each} for n, each in enumerate(ids)]
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = datasets.load_dataset("json", data_files=f"{name}.jsonl", split="train", cache_dir=f"cache-{name}")
    trace.to_json(f"{name}-again.jsonl")
    return trace.features["hash_ids"].feature.dtype, [json.loads(line)["hash_ids"] for line in Path(f"{name}-again.jsonl").read_text().splitlines()]


small = [[HALF - 2, HALF - 1], [HALF - 2, HALF - 7]]
large = [[HALF + 1, 1234567890123456789], [HALF + 2, 1234567890123456780]]
text = [[str(each) for each in ids] for ids in large]
found = {name: through(name, ids) for name, ids in (("below", small), ("from", large), ("text", text))}
for name, (dtype, ids) in found.items():
    print(f"{name}: {dtype}, {ids}")
kept = pandas.read_json("from.jsonl", lines=True)["hash_ids"].tolist()
print("pandas:", kept)
dtype, rounded = found["from"]
same = (
    found["below"] == ("int64", small)
    and dtype == "float64"
    and rounded[0] == rounded[1] == [9223372036854775808 // 10**9 * 1e9 + 1e9, 1234567890 * 1e9]
    and found["text"] == ("string", text)
    and kept == large
)
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
