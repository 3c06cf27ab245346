"""The tiny model is made without torch, as torch and transformers make it."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.worker.models.tiny_model import make_tiny_model

FILE = "model.safetensors"
MAKE = """
    import sys
    sys.modules["torch"] = sys.modules["transformers"] = sys.modules["safetensors"] = None
    from kvmesh.cli.main import main
    sys.exit(main(["model", "tiny", sys.argv[1], "--seed", "3"]))
"""


def test_a_seed_gives_the_same_bytes_in_a_process_without_torch(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "here", 3)
    make_tiny_model(tmp_path / "other", 4)
    code = "\n".join(line.strip() for line in MAKE.splitlines())
    subprocess.run([sys.executable, "-c", code, tmp_path / "there"], check=True)
    here, there, other = ((tmp_path / n / FILE).read_bytes() for n in ("here", "there", "other"))
    assert here == there != other
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        FILE,
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_weights_are_those_that_transformers_draws(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    make_tiny_model(tmp_path, 5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        drawn = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path)).state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == drawn.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, drawn[name], rtol=0, atol=1e-6)
