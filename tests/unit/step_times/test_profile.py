"""Step profiles: NPZ files of measured times, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from kvmesh.step_times.interface import DecodeLoad
from kvmesh.step_times.profile import EngineLimits, StepProfile, StepProfileError

ARRAYS = {
    "prefill_isl": np.array([100, 200, 400]),
    "prefill_ttft_ms": np.array([10.0, 20.0, 80.0]),
    "decode_active_kv_tokens": np.array([0, 1000]),
    "decode_context_length": np.array([10, 20, 30]),
    "decode_itl": np.array([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]]),
}


def saved(tmp_path: Path, **changes: object) -> Path:
    file = tmp_path / "profile.npz"
    np.savez(file, **{**ARRAYS, **changes})  # type: ignore[arg-type]
    return file


def test_a_profile_is_linear_between_its_points_and_beyond(tmp_path: Path) -> None:
    profile = StepProfile.load(saved(tmp_path))
    times = [round(profile.prefill(n) * 1000, 6) for n in (0, 50, 100, 150, 300, 500)]
    assert times == [0, 5, 10, 15, 50, 110]
    assert profile.decode(DecodeLoad(0, 0, 2000)) == 0
    assert profile.decode(DecodeLoad(50, 500, 2000)) == pytest.approx(6.0e-3)
    assert profile.decode(DecodeLoad(40, 1000, 2000)) == pytest.approx(12.5e-3)
    assert profile.decode(DecodeLoad(100, 2000, 2000)) == pytest.approx(22.0e-3)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prefill_isl": np.array([100, 100, 400])}, "prefill_isl must rise"),
        ({"prefill_isl": np.array([100])}, "two points"),
        ({"prefill_ttft_ms": np.array([1.0, 2.0])}, "prefill_ttft_ms has shape"),
        ({"decode_itl": np.array([1.0, 2.0])}, "decode_itl has shape"),
        ({"prefill_ttft_ms": np.array([1.0, np.nan, 2.0])}, "not finite"),
        ({"prefill_isl": np.array(["a", "b", "c"])}, "not a performance profile"),
    ],
)
def test_a_bad_profile_is_explained(tmp_path: Path, changes: dict[str, object], fault: str) -> None:
    with pytest.raises(StepProfileError, match=fault):
        StepProfile.load(saved(tmp_path, **changes))


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("no")
    with pytest.raises(StepProfileError, match=r"text\.npz"):
        StepProfile.load(text)
    np.savez(tmp_path / "less.npz", prefill_isl=ARRAYS["prefill_isl"])
    with pytest.raises(StepProfileError, match="prefill_ttft_ms"):
        StepProfile.load(tmp_path / "less.npz")


def test_limits_are_read_if_all_are_there(tmp_path: Path) -> None:
    some = {"max_batched_tokens": np.array(2048), "max_sequences": np.array(64)}
    assert StepProfile.load(saved(tmp_path, **some)).limits is None
    every = StepProfile.load(saved(tmp_path, **some, kv_tokens=np.array(4096)))
    assert every.limits == EngineLimits(2048, 64, 4096)
    with pytest.raises(StepProfileError, match="kv_tokens must be"):
        StepProfile.load(saved(tmp_path, **some, kv_tokens=np.array(0)))
