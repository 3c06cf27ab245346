"""Model folders, cards and default models."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvmesh.bus.messages import (
    Capacity,
)
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.engine import EngineError, EngineInfo
from kvmesh.worker.model_card import card_labels, model_card
from kvmesh.worker.model_folder import DEFAULT_CONTEXT, has_chat_template, model_context
from kvmesh.worker.models.choice import default_model

INFO = EngineInfo(
    name="mock",
    version="1",
    context=100,
    block_size=16,
    capacity=Capacity(blocks=10, max_sequences=4, max_batched_tokens=64, dp_ranks=2),
    adapters=["lora"],
)


@pytest.mark.parametrize(
    ("config", "tokenizer", "context"),
    [
        ({"max_position_embeddings": 4096}, {}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}}, {}, 8192),
        ({}, {"model_max_length": 2048}, 2048),
        ({}, {"model_max_length": 10**30}, DEFAULT_CONTEXT),
        ({"max_position_embeddings": 0}, {}, DEFAULT_CONTEXT),
        ([], {}, DEFAULT_CONTEXT),
    ],
)
def test_the_context_comes_from_the_folder(
    tmp_path: Path, config: object, tokenizer: object, context: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert model_context(tmp_path) == context


def test_a_damaged_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json"):
        model_context(tmp_path)


def test_dialects_come_from_settings_then_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "kvmesh.json").write_text('{"tool_parser": "hermes", "reasoning_parser": "qwen3"}')
    card = model_card(WorkerSettings(tool_parser="mistral"), folder, INFO, "digest")
    assert (card.name, card.tool_parser, card.reasoning_parser) == ("tiny", "mistral", "qwen3")
    assert model_card(WorkerSettings(served_name="shown"), tmp_path, INFO, "digest").name == "shown"


def test_a_named_template_is_part_of_the_card(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("d")
    before = model_card(WorkerSettings(), tmp_path, INFO, "digest").template
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert model_card(WorkerSettings(), tmp_path, INFO, "digest").template != before


def test_labels_are_pairs() -> None:
    assert card_labels(WorkerSettings(labels=["zone=a", "gpu=h200=2"])) == {
        "zone": "a",
        "gpu": "h200=2",
    }
    for bad in ("zone", "=a"):
        with pytest.raises(EngineError, match="key=value"):
            card_labels(WorkerSettings(labels=[bad]))


def test_a_mock_needs_no_model_and_a_random_one_is_made_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as made:
        assert (default_model("mock", made) / "tokenizer.json").is_file()
        with pytest.raises(EngineError, match="the vllm engine needs a model: --model FOLDER"):
            default_model("vllm", made)
        assert not list(tmp_path.iterdir())
        pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
        folder = default_model("torch", made)
        assert list(folder.glob("*.safetensors"))
    assert not folder.parent.exists()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', True),
        ("tokenizer_config.json", '{"model_max_length": 1}', False),
    ],
)
def test_a_missing_chat_template_is_noticed(
    tmp_path: Path, name: str, text: str, found: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert has_chat_template(tmp_path) is found
