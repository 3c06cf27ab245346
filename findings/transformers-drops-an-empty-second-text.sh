#!/bin/sh
# A cross-encoder scores a query and a document as a pair of texts. transformers 5.24.0 makes a pair with an empty document a single text
# if the two are arguments of one call, and a pair if they come in a list: the second separator, with its segment, is there or not. So a
# reranker gives an empty document one score on its own (as vLLM's /v1/rerank asks) and another one in a batch (as sentence-transformers
# does). The tokenizers library always makes a pair. Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0
cat > program.py <<'EOF'
import sys

from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

made = Tokenizer(models.WordLevel({"query": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="query"))
made.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="query")
found = {
    "two arguments": tokenizer("query", "")["input_ids"],
    "a list of one pair": tokenizer([("query", "")])["input_ids"][0],
    "tokenizers": made.encode("query", "").ids,
}
for name, ids in found.items():
    print(f"{name}: {[made.id_to_token(token) for token in ids]}")
same = list(found.values()) == [[1, 0, 2], [1, 0, 2, 2], [1, 0, 2, 2]]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
