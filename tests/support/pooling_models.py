"""Tiny models with random weights that embed texts or score pairs, and what they ought to say."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvmesh.demo import model_dir

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["a", "the", "of", "capital", "france", "is", "paris", "how", "to", "cook", "rice"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "initializer_range": 0.2,  # with the usual weights all vectors would be about equal
}


def _bert_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = dict.fromkeys([*SPECIAL, *WORDS, *LETTERS, *(f"##{each}" for each in LETTERS)])
    ids = {text: index for index, text in enumerate(vocabulary)}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_bert(folder: Path, scores: bool) -> Path:
    """The folder of an encoder: a cross-encoder if it `scores`, else one that embeds."""
    tokenizer = _bert_tokenizer()
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **SIZES)
    torch.manual_seed(1)
    if scores:
        config.num_labels = 1
        BertForSequenceClassification(config).save_pretrained(folder)
    else:
        BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_decoder(folder: Path) -> Path:
    """The folder of a decoder that embeds by its last token, as sentence-transformers has them."""
    config = Qwen3Config(
        vocab_size=8192,
        max_position_embeddings=512,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=8184,
        pad_token_id=8182,
        bos_token_id=None,
        is_matryoshka=True,
        **SIZES,
    )
    torch.manual_seed(2)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_dir() / name).read_bytes())
    kinds = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_N", "Normalize")]
    modules = [
        {"idx": int(i), "name": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, path, kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@torch.no_grad()
def embedding(folder: Path, text: str, place: int) -> list[float]:
    """The vector of a text by the state at `place`: 0 the first token, -1 the last."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    states = AutoModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state
    found: list[float] = torch.nn.functional.normalize(states[0, place], dim=0).tolist()
    return found


@torch.no_grad()
def score(folder: Path, query: str, document: str) -> float:
    """The score of a document for a query by a cross-encoder."""
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(query, document)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    kinds = torch.tensor([encoding.type_ids])
    logits = model(torch.tensor([encoding.ids]), token_type_ids=kinds).logits
    return float(torch.sigmoid(logits[0, 0]))
