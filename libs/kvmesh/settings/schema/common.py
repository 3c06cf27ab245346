"""Types and base class of all sections."""

from typing import Annotated

from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Positive
Weight = Annotated[float, Meta(ge=0)]
LOOPBACK = "127.0.0.1"
# never printed, not a flag; also read from a file: password_file, KVMESH_NATS_PASSWORD_FILE …
Secret = Annotated[str, Meta(extra={"secret": True})]
LIVE = Meta(extra={"live": True})  # `kvmesh config set` changes it in running processes
Url = Annotated[str, Meta(extra={"url": True})]  # printed without its user and password


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections; an unknown key is an error.

    The docstring of a section describes its keys, each as `key: text`. Behind the line `Tuning:`
    stand those whose defaults suit nearly every mesh; `--help` leaves them out.
    """
