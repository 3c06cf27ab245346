"""Tenants that attack one another, and their tools."""

from kvmesh._native import xxh3

VICTIM, EVIL = "team-a", "evil"
# The unkeyed 64-bit hash of model and tenant is equal for `EVIL` followed by this and `VICTIM`.
FORGED = (
    "aaaaY2KTh9dbfI/R4wggRB1QxDKUcKVl7J634i58YVDBdxYr3Molmy45Ymsckcd6"
    "eo7raaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
)


def unkeyed(model: str, tenant: str) -> int:
    """A salt that anyone can compute, who can therefore search for a colliding tenant name."""
    fields = [field.encode() for field in (model, "", tenant)]
    return xxh3(b"".join(len(field).to_bytes(4, "little") + field for field in fields))
