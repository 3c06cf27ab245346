"""Retention options of engines that manage their own blocks, read from the settings."""

from kvmesh.retention.token_ranges import RetentionError, parse_defaults
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.enginecore.retention_options import RetentionOptions


def retention_options(worker: WorkerSettings) -> RetentionOptions:
    """Retention options of `[worker]`; raises EngineConfigError."""
    try:
        defaults = parse_defaults(worker.retention)
    except RetentionError as error:
        raise EngineConfigError(f"worker.retention: {error}") from error
    return RetentionOptions(
        budget=worker.tenant_share,
        session_idle_s=worker.session_idle_s,
        defaults=defaults,
    )
