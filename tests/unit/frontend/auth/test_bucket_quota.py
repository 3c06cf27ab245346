"""The bytes that a tenant has in a bucket."""

from kvmesh.frontend.auth.bucket_quota import OwnerUsage


def test_an_entry_that_is_gone_counts_no_more() -> None:
    usage = OwnerUsage({"o.a.0": 3, "o.a.1": 2, "o.b.0": 4}, 0.0)
    usage.remove("o.a")
    usage.remove("o.unknown")
    assert usage.total == 4
    assert usage.evict(3) == ["o.b"]
