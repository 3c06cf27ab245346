"""Errors of the planner."""


class PlannerConfigError(Exception):
    """The planner cannot run with its settings; the message names the setting and the reason."""
