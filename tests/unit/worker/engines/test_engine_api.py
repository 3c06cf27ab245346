"""The recorded interfaces of SGLang and TensorRT-LLM, and the adapters on recorded payloads."""

import copy
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engine_api import (
    DISTRIBUTIONS,
    SOURCES,
    Record,
    differences,
    installed,
    read_package,
    recorded,
    recorded_class,
)

from kvmesh.worker.adapters.kv_events.cache_events import (
    AllCleared,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
)
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.sglang_fields import AnswerReader
from kvmesh.worker.engines.trtllm.events import EventReader


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_the_installed_package_has_all_that_is_recorded(package: str) -> None:
    found = installed(package)
    if found is None:
        pytest.skip(f"{DISTRIBUTIONS[package]} is not installed")
    root, release = found
    ours, theirs = recorded(package), read_package(package, root, release)
    names = {name: fields for name, fields in ours.names.items() if name in SOURCES[package]}
    known = msgspec.structs.replace(
        ours, names=names, payloads=ours.payloads if theirs.payloads else {}
    )
    assert list(differences(known, theirs)) == [], f"recorded of {ours.version}, not {release}"


def test_differences_name_what_is_missing() -> None:
    record = Record("p", "1", "", {"f": ["a", "b?"]}, {"x": 1})
    other = Record("p", "2", "", {"f": ["a", "b"]}, {"x": 2})
    assert list(differences(record, other)) == ["f lacks b?", "payloads are {'x': 2}"]


def test_a_package_is_read_from_its_sources(tmp_path: Path) -> None:
    classes: dict[str, dict[str, list[str]]] = {}
    for name, path in SOURCES["tensorrt_llm"].items():
        kind, _, method = name.partition(".")
        line = (
            f"async def {method}(self, a, b=1, *, c): ..." if method else "a: int\n    b: int = 1"
        )
        classes.setdefault(path, {}).setdefault(kind, []).append(line)
    for path, kinds in classes.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        bodies = (f"class {kind}:\n    " + "\n    ".join(kinds[kind]) for kind in kinds)
        (tmp_path / path).write_text("\n".join(bodies))
    record = read_package("tensorrt_llm", tmp_path, "1")
    assert record.names["BaseLLM.generate_async"] == ["a", "b?", "*", "c"]
    assert record.names["DisaggregatedParams"] == ["a", "b?"]
    empty = tmp_path / "other" / "llmapi"
    empty.mkdir(parents=True)
    (empty / "llm.py").write_text("class BaseLLM: ...")
    with pytest.raises(LookupError, match=r"does not define BaseLLM\.generate_async"):
        read_package("tensorrt_llm", empty.parent, "1")


def test_a_standin_refuses_what_is_not_recorded() -> None:
    closing = recorded_class(recorded("sglang"), "CloseSessionReqInput")
    assert closing(session_id="s").session_id == "s"
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        closing(session_id="s", other=1)
    with pytest.raises(TypeError, match="missing a required argument: 'session_id'"):
        closing()


def test_events_of_sglang_carry_salt_and_tier() -> None:
    batch = recorded("sglang").payloads["batch"]
    stored, removed, *cleared = EventDecoder().decode(msgspec.msgpack.encode(batch))
    tokens = array("I", range(8)).tobytes()
    assert stored == BlocksStored([2**64 - 2, 5], None, tokens, 4, 0, 0xAB)
    assert removed == BlocksRemoved([5], 1)
    assert cleared == [AllCleared(0), AllCleared(1, maybe=True)]


@pytest.mark.parametrize("field", ["token_extra_id", "mm_keys", "lora_id", "cache_salt"])
def test_blocks_of_trtllm_with_other_keys_are_in_no_prompt(field: str) -> None:
    event = copy.deepcopy(recorded("tensorrt_llm").payloads["stored"])
    (block,) = event["data"]["blocks"]
    if field == "mm_keys":
        block["mm_keys"] = [{"type": "mm_key", "hash": "ab", "start_offset": 1}]
    elif field == "token_extra_id":
        block["tokens"][2]["token_extra_id"] = 7
    else:
        block[field] = {"lora_id": 3, "cache_salt": "a client's own"}[field]
    [stored] = EventReader(4).read(event)[1]
    assert isinstance(stored, BlocksStored)
    assert stored.extras
    assert stored.extras[0]


def test_differences_of_trtllm_move_blocks() -> None:
    events = recorded("tensorrt_llm").payloads
    reader = EventReader(4)
    results = {name: reader.read(events[name])[1] for name in ("created", *events)}
    tokens = array("I", range(4)).tobytes()
    assert results == {
        "created": [],
        "stored": [BlocksStored([17], None, tokens, 4, 0)],
        "moved": [BlocksMoved([17], 0, 1)],
        "reprioritised": [],
        "removed": [BlocksRemoved([17], 1)],
    }


def test_events_of_trtllm_may_have_digests_salts_and_groups_of_layers() -> None:
    data = msgspec.convert(recorded("tensorrt_llm").payloads["stored"]["data"], dict)
    [block] = data["blocks"]
    digest = "ab" * 24 + "00000000000000ff"
    salted = block | {"block_hash": digest, "cache_salt": "tag-kvm00000000000000ab"}
    event = {"event_id": 0, "window_size": 8, "data": data | {"blocks": [salted]}}
    reader = EventReader(4)
    [stored] = reader.read(event | {"layer_group_id": 1})[1]
    assert isinstance(stored, BlocksStored)
    assert (stored.hashes, stored.salt) == ([0xFF], 0xAB)
    assert reader.read(event | {"event_id": 1, "layer_group_id": 0}) == (0, [])


def test_each_attention_rank_of_trtllm_removes_its_own_copy() -> None:
    stored, removed, moved = (
        recorded("tensorrt_llm").payloads[name] for name in ("stored", "removed", "moved")
    )
    reader, ledger = EventReader(4), CacheLedger(4, lambda event, held: 0)

    def take(number: int, rank: int, event: dict[str, Any]) -> int:
        """Take an event of a rank; the blocks that the worker has in all tiers then."""
        of_rank = event | {"event_id": number, "attention_dp_rank": rank}
        ledger.apply(reader.read(of_rank)[1])
        return len(ledger.dump()) - 1

    assert [take(0, rank, stored) for rank in (0, 1)] == [1, 1]
    assert take(1, 0, stored) == 1  # told again, held once
    assert take(1, 1, moved) == 2
    assert (take(2, 0, removed), len(ledger)) == (1, 0), "the copy in the host's memory stays"
    assert take(2, 1, removed) == 0
    assert take(3, 1, removed) == 0
    assert take(3, 0, stored) == 1


@pytest.mark.parametrize("level", [-1, 9, "GPU"])
def test_an_unknown_cache_level_is_malformed(level: object) -> None:
    reader = EventReader(4)
    reader.read(recorded("tensorrt_llm").payloads["stored"])
    update = {
        "type": "updated",
        "block_hash": 17,
        "cache_level": {"old_value": 0, "new_value": level},
    }
    with pytest.raises(ValueError, match="cache level"):
        reader.read({"event_id": 2, "window_size": 512, "data": update})


def test_chunks_of_sglang_may_list_tokens_ahead_of_their_count() -> None:
    reader, ids = AnswerReader(), [1, 2, 3, 4]
    chunks = [{"output_ids": ids, "meta_info": {"completion_tokens": n}} for n in (1, 3, 4)]
    assert [reader.read(chunk).tokens for chunk in chunks] == [[1], [2, 3], [4]]
    reader = AnswerReader()
    parts = (([1], 1), ([2, 3], 3), ([4], 4))
    deltas = [{"output_ids": ids, "meta_info": {"completion_tokens": n}} for ids, n in parts]
    assert [reader.read(chunk).tokens for chunk in deltas] == [[1], [2, 3], [4]]
