"""Options of simulated engines, from the settings."""

from kvmesh.settings.schema import MockSettings
from kvmesh.step_times.registry import load_step_profile
from kvmesh.worker.enginecore.block_manager import DEFAULTS
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.simulated_tiers import tier_options
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.worker.engines.mock.pace import PaceOptions
from kvmesh.worker.engines.mock.timing import PolynomialStepModel


def core_options(
    mock: MockSettings, block_size: int, retention: RetentionOptions = DEFAULTS
) -> CoreOptions:
    """The options of `[mock]`; raises StepProfileError."""
    return CoreOptions(
        blocks=mock.blocks,
        limits=SchedulerLimits(
            block_size=block_size,
            max_sequences=mock.max_sequences,
            max_batched_tokens=mock.max_batched_tokens,
            watermark=mock.watermark,
        ),
        model=load_step_profile(mock.profile) if mock.profile else PolynomialStepModel(),
        tiers=tier_options(mock),
        speedup=mock.speedup,
        retention=retention,
        pace=PaceOptions(
            **{name: getattr(mock, name) for name in PaceOptions.__dataclass_fields__}
        ),
    )
