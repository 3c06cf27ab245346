"""Settings of transfers between processes: KV blocks, and weights."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Secret, Section


class TransferSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "readers staging_bytes lend_s timeout_s"
    via: Annotated[
        Literal["auto", "nixl", "tcp"],
        Meta(description="transport of KV blocks and weights; auto: NIXL if both sides have it"),
    ] = "auto"
    host: Annotated[str, Meta(description="address on which blocks are served to others")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="its port; 0: a free one")] = 0
    advertise: Annotated[
        str, Meta(description="address that other processes connect to; empty: host")
    ] = ""
    readers: Annotated[Count, Meta(description="concurrent readers")] = 64
    staging_bytes: Annotated[
        Count,
        Meta(description="staging memory of a prefill or decode worker for blocks in transfer"),
    ] = 1 << 30
    lend_s: Annotated[
        Seconds,
        Meta(description="time for which a prefill worker lends a prompt's blocks"),
    ] = 30.0
    timeout_s: Annotated[
        Seconds, Meta(description="time after which a prompt is computed instead of transferred")
    ] = 10.0


class WeightsSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "sources patience_s wait_s cache_wait_s"
    share: Annotated[
        bool,
        Meta(description="take weights from other workers of the model, and offer one's own"),
    ] = False
    keep: Annotated[
        bool,
        Meta(description="keep the copy in shared memory after the last worker that uses it"),
    ] = False
    directory: Annotated[
        Path, Meta(description="directory of the copies; each user of a machine needs their own")
    ] = Path("/dev/shm/kvmesh-weights")
    max_bytes: Annotated[
        int,
        Meta(ge=0, description="largest size of all copies; 0: half of the machine's memory"),
    ] = 0
    sources: Annotated[Count, Meta(description="workers from which weights come at once")] = 4
    upload_bytes_per_s: Annotated[
        int, Meta(ge=0, description="bytes that are sent to other workers per second; 0: no limit")
    ] = 0
    port: Annotated[Port, Meta(description="port on which weights are served; 0: a free one")] = 0
    patience_s: Annotated[
        Seconds, Meta(description="wait for a source before weights are read from the disk")
    ] = 10.0
    wait_s: Annotated[
        Seconds, Meta(description="wait for a source if there are no weights on the disk")
    ] = 120.0
    models_directory: Annotated[
        Path | None, Meta(description="directory of models of the mesh; none: in the user's cache")
    ] = None
    models_bytes: Annotated[
        Count, Meta(description="largest size of all models of the mesh on this machine")
    ] = 256 << 30
    compile_cache: Annotated[
        bool,
        Meta(description="keep the code that vllm compiles on disk, one cache per environment"),
    ] = False
    cache_directory: Annotated[
        Path | None, Meta(description="directory of compile caches; none: in the user's cache")
    ] = None
    cache_bytes: Annotated[Count, Meta(description="largest size of all compile caches")] = 8 << 30
    cache_wait_s: Annotated[
        Seconds, Meta(description="wait for a compile cache from another worker")
    ] = 10.0
    domain_key: Annotated[
        Secret,
        Meta(
            description="64 hexadecimal digits, shared by workers that run each other's compiled"
            " code; empty: none does"
        ),
    ] = ""
