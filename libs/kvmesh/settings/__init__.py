"""Typed settings: one schema for the TOML file, the environment and the command line."""

from kvmesh.settings.load import (
    CONFIG,
    Flag,
    Option,
    OptionKey,
    SettingsError,
    load,
    options,
    to_env,
    variables,
)
from kvmesh.settings.redaction import HIDDEN, redacted
from kvmesh.settings.schema import Settings

__all__ = [
    "CONFIG",
    "HIDDEN",
    "Flag",
    "Option",
    "OptionKey",
    "Settings",
    "SettingsError",
    "load",
    "options",
    "redacted",
    "to_env",
    "variables",
]
