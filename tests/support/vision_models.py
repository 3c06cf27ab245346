"""A tiny Idefics3 with random weights, which splits an image into tiles by its size.

vLLM and transformers run it without torchvision, as few others.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from kvmesh.demo import model_dir

IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
PATCH, TILE, SCALE = 14, 56, 2
MOST = 2  # tiles on each side
CONTEXT = 2048
END_OF_TURN, END_OF_TEXT = 8184, 8182
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def make_idefics3(folder: Path) -> Path:
    """Write the folder of the model, of about 5 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    places = [f"<row_{y}_col_{x}>" for y in range(1, 7) for x in range(1, 7)]
    special = [AddedToken(t, special=True) for t in (IMAGE, AROUND, WHOLE, *places)]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN,
        "pad_token_id": END_OF_TEXT,
        **SIZES,
    }
    vision = {"num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH, **SIZES}
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=tokenizer.token_to_id(IMAGE),
        pad_token_id=END_OF_TEXT,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Idefics3ForConditionalGeneration(config)
        for parameter in model.model.connector.parameters():
            parameter.data.mul_(20.0)  # with the usual weights all images would be about equal
        model.save_pretrained(folder)
    settings = json.loads((model_dir() / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("<|image|>", IMAGE)
    settings |= {"model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    seq = (TILE // PATCH // SCALE) ** 2
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": seq}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": TILE},
        "size": {"longest_edge": MOST * TILE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    generation = {"eos_token_id": [END_OF_TURN, END_OF_TEXT], "pad_token_id": END_OF_TEXT}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
