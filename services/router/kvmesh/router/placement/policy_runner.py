"""Calls of policies, which may be third-party code: a failure is logged and a default used."""

from operator import index
from random import Random

import numpy as np

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import Outcome, RouteEvent, RouteRequest
from kvmesh.router.errors import InvalidRouteRequest, RouterConfigError
from kvmesh.router.placement.failure_log import FailureLog
from kvmesh.router.policies.base import Kv, Policy
from kvmesh.router.policies.registry import make_policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice
from kvmesh.router.scoring.cost import CostModel
from kvmesh.settings.schema import RouterSettings

LEARNING_HOOKS = ("on_placed", "on_finished", "on_freed")  # of policies that learn
_FALLBACK = Kv()


class PolicyRunner:
    """The policies of one router; `default` is that of the settings, `failures` counts by name.

    A failed choice is made by `kv`; any other failed call has the result of the base class.
    """

    def __init__(self, settings: RouterSettings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng
        self._failures = FailureLog()
        self.failures = self._failures.counts
        self._policies: dict[str, Policy] = {}
        self._learners: list[tuple[str, Policy]] = []
        self.default = self._make(settings.policy)

    def find(self, name: str) -> Policy:
        """A policy by name; a request must not load code that is not installed as a policy.

        Raises InvalidRouteRequest for an unknown name.
        """
        known = self._policies.get(name)
        if known is not None:
            return known
        if ":" in name:
            raise InvalidRouteRequest(f"{name!r} is not the name of an installed policy")
        try:
            return self._make(name)
        except RouterConfigError as error:
            raise InvalidRouteRequest(error.reason) from None

    def _make(self, name: str) -> Policy:
        policy = self._policies[name] = make_policy(name, self._settings)
        if any(getattr(type(policy), hook) is not getattr(Policy, hook) for hook in LEARNING_HOOKS):
            self._learners.append((name, policy))
        return policy

    def choose(
        self, name: str, policy: Policy, candidates: Candidates, model: CostModel
    ) -> PolicyChoice:
        """The policy's choice, or that of `kv` if the policy fails."""
        try:
            choice = policy.choose(candidates, model, self._rng)
            chosen, cost = index(choice.chosen), np.asarray(choice.cost, np.float64)
            if not 0 <= chosen < len(candidates) or cost.shape != (len(candidates),):
                raise IndexError(f"chose {chosen} of {len(candidates)} candidates")
            return PolicyChoice(chosen, cost, None if choice.note is None else str(choice.note))
        except Exception as error:
            self._failures.note(name, f"policy {name} failed; kv decides instead", error)
            choice = _FALLBACK.choose(candidates, model, self._rng)
            return choice._replace(note=f"kv in place of {name}: {cause(error)}")

    # hooks of the policies in use

    def apply_route_event(self, event: RouteEvent, now: float) -> None:
        """Call `on_placed` or `on_finished` of the policies that learn."""
        for name, policy in self._learners:
            try:
                if isinstance(event, Outcome):
                    policy.on_finished(event, now)
                else:
                    policy.on_placed(event, now)
            except Exception as error:
                hook = "on_finished" if isinstance(event, Outcome) else "on_placed"
                self._log_failure(name, hook, error)

    def on_freed(self, request: str, now: float) -> None:
        """Call `on_freed` of the policies that learn."""
        for name, policy in self._learners:
            try:
                policy.on_freed(request, now)
            except Exception as error:
                self._log_failure(name, "on_freed", error)

    def tick(self, now: float) -> None:
        """Call `tick` of every policy in use."""
        for name, policy in self._policies.items():
            try:
                policy.tick(now)
            except Exception as error:
                self._log_failure(name, "tick", error)

    # calls of the default policy

    def admits(self, request: RouteRequest, now: float) -> bool:
        """`Policy.admits`; True if it fails."""
        try:
            return bool(self.default.admits(request, now))
        except Exception as error:
            self._log_failure(self._settings.policy, "admits", error)
            return True

    def queue_boost_s(self, request: RouteRequest) -> float:
        """`Policy.queue_boost_s`; 0 if it fails."""
        try:
            return float(self.default.queue_boost_s(request))
        except Exception as error:
            self._log_failure(self._settings.policy, "queue_boost_s", error)
            return 0.0

    def _log_failure(self, policy: str, call: str, error: Exception) -> None:
        self._failures.note(policy, f"policy {policy} failed in {call}()", error)
