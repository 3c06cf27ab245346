"""Policies by name: built-in ones, entry points, and `module:Class`."""

import importlib
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

from kvmesh.router.errors import RouterConfigError
from kvmesh.router.policies.admission import AgentAdmission
from kvmesh.router.policies.base import (
    Kv,
    KvMultiplicative,
    LeastLoaded,
    LoadAware,
    Policy,
    PowerOfTwo,
    RoundRobin,
    Uniform,
)
from kvmesh.router.policies.session import SessionPolicy
from kvmesh.settings.schema import RouterSettings

ENTRY_POINTS = "kvmesh.policies"
BUILT_IN: dict[str, Callable[[RouterSettings], Policy]] = {
    "kv": lambda settings: AgentAdmission() if settings.admit_agents else Kv(),
    "kv-multiplicative": lambda _: KvMultiplicative(),
    "least-loaded": lambda _: LeastLoaded(),
    "power-of-two": lambda _: PowerOfTwo(),
    "load-aware": lambda settings: LoadAware(settings.load_beta),
    "session": lambda s: SessionPolicy(s.session_mode, s.session_ttl_s, s.session_spill),
    "round-robin": lambda _: RoundRobin(),
    "random": lambda _: Uniform(),
}


def make_policy(name: str, settings: RouterSettings) -> Policy:
    """A new policy by name; raises RouterConfigError if it is unknown or its creation fails."""
    if name in BUILT_IN:
        return BUILT_IN[name](settings)
    make = _load(name)
    try:
        policy = make()
        if isinstance(policy, Policy):
            float(policy.history_s)
    except Exception as error:
        raise RouterConfigError("policy", f"{name} cannot be created: {_cause(error)}") from error
    if not isinstance(policy, Policy):
        raise RouterConfigError("policy", f"{name} is not a kvmesh.router.policies.base.Policy")
    return policy


def installed() -> dict[str, str]:
    """Entry points of installed policies: name to `module:Class`."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


@cache
def _entry_points() -> dict[str, str]:
    """The installed entry points, cached: they do not change, and reading takes milliseconds."""
    return installed()


def _load(name: str) -> Callable[[], object]:
    points = _entry_points()
    target = points.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        known = ", ".join(sorted({*BUILT_IN, *points}))
        raise RouterConfigError("policy", f"{name!r} is none of {known}, nor module:Class")
    try:
        found: Callable[[], object] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import runs arbitrary code
        raise RouterConfigError("policy", f"cannot load {target}: {_cause(error)}") from error
    return found


def _cause(error: Exception) -> str:
    """The error, and its position in the policy's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (__file__, importlib.__file__)
    policy_frames = [f for f in frames if f.filename not in own and f.filename[:1] != "<"]
    last = policy_frames[-1] if policy_frames else None
    where = f" ({last.filename}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {error}{where}"
