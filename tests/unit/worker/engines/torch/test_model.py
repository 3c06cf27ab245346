"""What the torch engine says about model folders, and what its engine adds to the protocol."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from msgspec.structs import replace
from support.recorder import Recorder
from support.tiny import tiny_model
from support.torch_core import BLOCK, Driver, load, make_core, make_work
from support.wait import eventually
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)
from transformers import PreTrainedConfig as Config

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.demo import model_dir
from kvmesh.settings import Settings
from kvmesh.settings.schema import TorchSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, Rejected
from kvmesh.worker.engines.torch.engine import TorchEngine, create
from kvmesh.worker.engines.torch.model.paged_model import PagedModel


def copy(folder: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), folder / "model"))


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        load(tmp_path)
    with pytest.raises(EngineError, match="no weights"):
        load(model_dir())


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    edit(folder, num_hidden_layers=3)
    with pytest.raises(EngineError, match=r"do not fit its config.*layers\.2"):
        load(folder)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(EngineError, match="cannot load the model"):
        load(folder)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    edit(folder, model_type="nonesuch", architectures=["NonesuchForCausalLM"])
    with pytest.raises(EngineError, match="nonesuch"):
        load(folder)


def test_what_cannot_be_paged_is_refused(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    edit(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(EngineError, match="dynamic"):
        load(folder)


@pytest.mark.parametrize(
    "config",
    [
        FalconConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2),
    ],
)
def test_attention_of_another_kind_is_refused(config: Config, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="cannot be paged"):
        load(tmp_path)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "gpt2": GPT2Config(
        vocab_size=300, n_embd=48, n_layer=2, n_head=3, n_positions=256, initializer_range=0.3
    ),
    "mistral, sliding window": MistralConfig(**SMALL, sliding_window=20),
    "gemma 2, soft caps": Gemma2Config(**SMALL, sliding_window=24, query_pre_attn_scalar=16),
    "mixtral, experts": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen 3": Qwen3Config(**SMALL),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_other_architectures_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    config: Config = FAMILIES[family]
    torch.manual_seed(4)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    tokens = [(7 * i + 3) % 300 for i in range(60)]
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, -1]
    driver = Driver(make_core(load(tmp_path), blocks=16, budget=24))
    driver.run(make_work("warm", tokens[:40], 1), make_work("a", tokens, 1, logprobs=5))
    best = torch.log_softmax(logits, -1).topk(5)
    (_, told), *_ = driver.answer("a")
    expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    assert told == {token: pytest.approx(value, abs=1e-3) for token, value in expected.items()}


async def started(folder: Path, **options: object) -> tuple[TorchEngine, Recorder]:
    section = replace(TorchSettings(blocks=64, threads=1), **options)
    settings = Settings(torch=section, worker=WorkerSettings(engine="torch", block_size=BLOCK))
    engine, sink = create(EngineContext(settings, folder)), Recorder()
    await engine.start(sink)
    return engine, sink


async def test_a_constraint_binds_the_model() -> None:
    engine, sink = await started(tiny_model())
    guided = Guided(kind="regex", value="[0-9]{3}")
    engine.submit(make_work("a", [5, 6, 7], 50, guided=guided, ignore_eos=False))
    await eventually(lambda: sink.finish("a"), timeout=60)
    assert sink.finish("a") == "stop"
    with pytest.raises(Rejected, match="unclosed"):
        engine.submit(make_work("b", [5], guided=Guided(kind="regex", value="(")))
    with pytest.raises(Rejected, match="empty"):
        engine.submit(make_work("c", []))
    with pytest.raises(Rejected, match="vocabulary"):
        engine.submit(make_work("c", [9000]))
    await engine.close()


async def test_a_model_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sink = await started(tiny_model())

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(PagedModel, "forward", fail)
    engine.submit(make_work("a", [5, 6, 7]))
    await eventually(lambda: sink.errors, timeout=60)
    assert "the torch engine died: RuntimeError: out of order" in str(sink.errors[0])
    await engine.close()


async def test_options_that_cannot_be_met_stop_the_start() -> None:
    with pytest.raises(EngineError, match="holds no block"):
        await started(tiny_model(), blocks=0, kv_bytes=100)
    with pytest.raises(EngineError, match="unknown device"):
        await started(tiny_model(), device="nonesuch")


async def test_a_seeded_answer_is_the_same_in_company() -> None:
    engine, sink = await started(tiny_model())
    sampling = Sampling(max_tokens=20, seed=11, top_p=0.9, ignore_eos=True)
    engine.submit(replace(make_work("alone", list(range(30))), sampling=sampling))
    await eventually(lambda: sink.finish("alone"), timeout=60)
    for i in range(4):
        engine.submit(make_work(f"other{i}", list(range(i, 50)), 30))
    engine.submit(replace(make_work("again", list(range(30))), sampling=sampling))
    await eventually(lambda: sink.finish("again"), timeout=60)
    assert sink.tokens("again") == sink.tokens("alone")
    await engine.close()
