"""Settings of transfers between processes: KV blocks, and weights."""

from pathlib import Path
from typing import Literal

from kvmesh.settings.schema.common import Amount, Count, Port, Seconds, Secret, Section


class TransferSettings(Section, frozen=True, kw_only=True):
    """
    via: transport of KV blocks and weights; auto: NIXL if both sides have it
    host: address on which blocks are served to others
    port: its port; 0: a free one
    advertise: address that other processes connect to; empty: host

    Tuning:
    readers: concurrent readers
    staging_bytes: staging memory of a prefill or decode worker for blocks in transfer
    lend_s: time for which a prefill worker lends a prompt's blocks
    timeout_s: time after which a prompt is computed instead of transferred
    """

    via: Literal["auto", "nixl", "tcp"] = "auto"
    host: str = "127.0.0.1"
    port: Port = 0
    advertise: str = ""
    readers: Count = 64
    staging_bytes: Count = 1 << 30
    lend_s: Seconds = 30.0
    timeout_s: Seconds = 10.0


class WeightsSettings(Section, frozen=True, kw_only=True):
    """
    share: take weights from other workers of the model, and offer one's own
    keep: keep the copy in shared memory after the last worker that uses it
    directory: directory of the copies; each user of a machine needs their own
    max_bytes: largest size of all copies; 0: half of the machine's memory
    upload_bytes_per_s: bytes that are sent to other workers per second; 0: no limit
    port: port on which weights are served; 0: a free one
    models_directory: directory of models of the mesh; none: in the user's cache
    models_bytes: largest size of all models of the mesh on this machine
    compile_cache: keep the code that vllm compiles on disk, one cache per environment
    cache_directory: directory of compile caches; none: in the user's cache
    cache_bytes: largest size of all compile caches
    domain_key: 64 hexadecimal digits, shared by workers that run each other's compiled code; empty:
        none does

    Tuning:
    sources: workers from which weights come at once
    patience_s: wait for a source before weights are read from the disk
    wait_s: wait for a source if there are no weights on the disk
    cache_wait_s: wait for a compile cache from another worker
    """

    share: bool = False
    keep: bool = False
    directory: Path = Path("/dev/shm/kvmesh-weights")
    max_bytes: Amount = 0
    sources: Count = 4
    upload_bytes_per_s: Amount = 0
    port: Port = 0
    patience_s: Seconds = 10.0
    wait_s: Seconds = 120.0
    models_directory: Path | None = None
    models_bytes: Count = 256 << 30
    compile_cache: bool = False
    cache_directory: Path | None = None
    cache_bytes: Count = 8 << 30
    cache_wait_s: Seconds = 10.0
    domain_key: Secret = ""
