"""Types and base class of all sections."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(ge=0)]
LOOPBACK = "127.0.0.1"
# never printed, not a flag; also read from a file: password_file, KVMESH_NATS_PASSWORD_FILE …
Secret = Annotated[str, Meta(extra={"secret": True})]
LIVE = {"live": True}  # `kvmesh config set` changes it in running processes
Url = Annotated[str, Meta(extra={"url": True})]  # printed without its user and password


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections; an unknown key is an error.

    `TUNING` names the keys whose defaults suit nearly every mesh; `--help` leaves them out.
    """

    TUNING: ClassVar = ""
