"""Profiles by name or file: shipped rooflines, TOML files like them, and NPZ files."""

from pathlib import Path

import msgspec

from kvmesh.step_times.profile import MOST_BYTES, StepProfile, StepProfileError
from kvmesh.step_times.roofline import Roofline, read_roofline

FOLDER = Path(__file__).with_name("profiles")


def shipped_profiles() -> dict[str, Path]:
    """Files of the shipped rooflines by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.toml"))}


def load_roofline(file: Path) -> Roofline:
    """Read a TOML file; raises StepProfileError."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise StepProfileError(f"{file} is not a performance profile: too large")
        return read_roofline(file.read_bytes())
    except OSError as error:
        raise StepProfileError(
            f"{file} is not a performance profile: {error.strerror} (shipped:"
            f" {', '.join(shipped_profiles())})"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = str(error).replace("`$.", "`")
        raise StepProfileError(f"{file} is not a performance profile: {reason}") from error


def load_step_profile(source: str | Path) -> StepProfile:
    """The profile of a shipped name, a TOML or an NPZ file; raises StepProfileError.

    A profile with which a longer prompt or a larger batch takes no time is refused.
    """
    file = shipped_profiles().get(str(source)) or Path(source)
    if file.suffix == ".toml" or not file.suffix:
        try:
            profile = load_roofline(file).profile()
        except ValueError as error:
            raise StepProfileError(f"{file}: {error}") from error
    else:
        profile = StepProfile.load(file)
    _check(profile, file)
    profile.name = file.stem
    return profile


def _check(profile: StepProfile, file: Path) -> None:
    """Raise StepProfileError if times vanish within or a little beyond the measured range."""
    prompt, active = profile.measured_tokens
    limits = profile.limits
    step = max(prompt, limits.max_batched_tokens if limits else 0)
    kv = max(active, limits.kv_tokens if limits else 0)
    if profile.prefill(int(step)) <= 0 or profile.prefill(max(int(step) // 2, 1)) <= 0:
        raise StepProfileError(f"{file}: prefill_ttft_ms falls to 0 at {step:,.0f} tokens")
    if profile.decode_seconds(1, 1) <= 0 or profile.decode_seconds(8, kv) <= 0:
        raise StepProfileError(f"{file}: decode_itl falls to 0 within {kv:,.0f} tokens")
