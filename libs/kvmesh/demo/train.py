"""Generates the demo model folder: `python -m kvmesh.demo.train`. The result is committed."""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvmesh.demo import NAME, model_dir
from kvmesh.demo.corpus import corpus

VOCABULARY = 8192
CONTEXT = 262_144
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>")
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# A word includes one leading mark or space, digits are grouped in threes, line ends are separate.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train() -> Tokenizer:
    """Train a byte-level BPE tokenizer of VOCABULARY tokens, the control tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return tokenizer


def files(tokenizer: Tokenizer) -> dict[str, str]:
    """Contents of the model folder's files by name."""
    end, stop = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["KvmeshDemoForCausalLM"],
        "model_type": NAME,
        "max_position_embeddings": CONTEXT,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": stop,
        "pad_token_id": end,
        "image_token_id": tokenizer.token_to_id("<|image|>"),
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE.read_text(),
    }
    generation = {"eos_token_id": [stop, end], "pad_token_id": end}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "config.json": json.dumps(config, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(train()).items():
        (folder / name).write_text(text)
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else model_dir())
