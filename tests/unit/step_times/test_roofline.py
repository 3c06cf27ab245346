"""Shipped rooflines and those of users: their times, their sources, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from kvmesh.step_times.interface import DecodeLoad
from kvmesh.step_times.profile import StepProfileError
from kvmesh.step_times.registry import load_roofline, load_step_profile, shipped_profiles


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_is_as_fast_as_its_roofline(name: str) -> None:
    roofline = load_roofline(shipped_profiles()[name])
    profile = load_step_profile(name)
    assert profile.limits is not None
    assert all(source.url.startswith("https://") for source in roofline.sources)
    for tokens in (1, 700, 8192, 20_000):
        exact = float(roofline.prefill_s(np.array(float(tokens))))
        assert profile.prefill(tokens) == pytest.approx(exact, rel=0.02)
    for sequences, share in ((1, 0.01), (32, 0.5), (200, 1.0)):
        tokens = int(profile.limits.kv_tokens * share)
        exact = float(roofline.decode_s(np.array(float(sequences)), np.array(float(tokens))))
        load = DecodeLoad(sequences, tokens, profile.limits.kv_tokens)
        assert profile.decode(load) == pytest.approx(exact, rel=0.05)


def test_published_measurements_are_near() -> None:
    ratios = []
    for file in shipped_profiles().values():
        roofline = load_roofline(file)
        for each in roofline.compared:
            tokens = np.array(float(each.tokens))
            sequences = np.array(float(each.sequences))
            modelled = (
                roofline.decode_s(sequences, tokens)
                if each.sequences
                else roofline.prefill_s(tokens)
            )
            ratios.append(1000 * float(modelled) / each.measured_ms)
    assert len(ratios) >= 3
    assert all(0.8 < ratio < 1.25 for ratio in ratios), ratios


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = shipped_profiles()["h100-llama-3.1-8b"].read_text()
    assert old in text
    file = tmp_path / "own.toml"
    file.write_text(text.replace(old, new))
    return file


def test_a_users_own_file_is_read(tmp_path: Path) -> None:
    slow = load_step_profile(edited(tmp_path, "bytes_per_s = 3.35e12", "bytes_per_s = 3.35e11"))
    fast = load_step_profile("h100-llama-3.1-8b")
    assert slow.decode_seconds(1, 1000) > 5 * fast.decode_seconds(1, 1000)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("memory_bytes = 8e10", "memory_bytes = 2e10", "hold the weights and 0 tokens"),
        ("count = 1", "count = 0", "accelerator.count"),
        ("compute_share = 0.5", "compute_share = 1.5", "assumed.compute_share"),
        ("layers = 32", "layer = 32", "layer"),
    ],
)
def test_an_unfit_roofline_is_explained(tmp_path: Path, old: str, new: str, fault: str) -> None:
    with pytest.raises(StepProfileError, match=fault):
        load_step_profile(edited(tmp_path, old, new))


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(StepProfileError, match=r"b200 is not .*shipped: .*h100-llama-3\.1-8b"):
        load_step_profile("b200")


def test_times_that_fall_to_nothing_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "falling.npz"
    arrays = {
        "prefill_isl": np.array([100, 200, 400]),
        "prefill_ttft_ms": np.array([10.0, 20.0, 80.0]),
        "decode_active_kv_tokens": np.array([0, 1000]),
        "decode_context_length": np.array([10, 20]),
        "decode_itl": np.array([[5.0, 5.0], [1.0, 0.0]]),
    }
    np.savez(file, **arrays)  # type: ignore[arg-type]
    with pytest.raises(StepProfileError, match="decode_itl falls to 0"):
        load_step_profile(file)
