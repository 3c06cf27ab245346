"""The `kvmesh` command."""

import kvmesh.runtime.process_start  # noqa: F401  # notes the time of the first line
