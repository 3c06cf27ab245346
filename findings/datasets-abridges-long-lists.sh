#!/bin/sh
# The `datasets` library 5.2.0 writes a list as numpy prints it: `Dataset.to_csv` of a trace separates block ids by blanks, and of a list with more
# than 1,000 of them writes the first and last three with `...` between. A prompt of 16K tokens in blocks of 16 has as many. It warns of nothing, and
# reads the column back as text. `to_json` writes all ids; `DataFrame.to_csv` of pandas, where the lists are Python's, does too.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pandas==3.1.1 numpy==2.4.6
cat > program.py <<'EOF'
import csv, json, sys, warnings
from pathlib import Path

import datasets
import pandas

datasets.disable_progress_bars()
warnings.simplefilter("error", UserWarning)  # a warning would be a change
rows = [{"timestamp": 1000 * n, "input_length": 16 * ids, "output_length": 5, "hash_ids": list(range(ids))} for n, ids in enumerate((1000, 1001))]
Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
trace = datasets.load_dataset("json", data_files="trace.jsonl", split="train", cache_dir="cache")
trace.to_csv("trace.csv")
trace.to_json("again.jsonl")
pandas.read_json("trace.jsonl", lines=True).to_csv("pandas.csv")
csv.field_size_limit(1 << 20)


def cells(name):
    return [row["hash_ids"] for row in csv.DictReader(Path(name).read_text().splitlines(keepends=True))]


full, abridged = cells("trace.csv")
print("1,000 ids, to_csv:", full[:20], "…", len(full.strip("[]").split()), "ids")
print("1,001 ids, to_csv:", abridged)
back = datasets.load_dataset("csv", data_files="trace.csv", split="train", cache_dir="cache")
print("read back as", type(back[1]["hash_ids"]).__name__)
same = (
    len(full.strip("[]").split()) == 1000
    and abridged.strip("[]").split() == ["0", "1", "2", "...", "998", "999", "1000"]
    and back[1]["hash_ids"] == abridged
    and [json.loads(line)["hash_ids"] for line in Path("again.jsonl").read_text().splitlines()] == [row["hash_ids"] for row in rows]
    and [json.loads(cell) for cell in cells("pandas.csv")] == [row["hash_ids"] for row in rows]
)
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
