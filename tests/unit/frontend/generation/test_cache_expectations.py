"""Comparison of expected with found cached tokens."""

from kvmesh.frontend.generation.cache_expectations import MIN_REQUESTS, CacheExpectations


def test_a_worker_that_finds_less_than_half_of_what_is_expected_is_named() -> None:
    expectations = CacheExpectations()
    for _ in range(MIN_REQUESTS - 1):
        expectations.add("m", "worker-0-ab", 1000, [1000], [100])
        expectations.add("m", "worker-1-cd", 1000, [1000], [990])
        expectations.add("m", "worker-2-ef", 0, [0], [0])
    assert expectations.wrong() == {}
    expectations.add("m", "worker-0-ab", 1000, [1000], [100])
    expectations.add("m", "worker-1-cd", 1000, [1000], [5000])
    found = expectations.wrong()
    assert list(found) == ["worker-0-ab"]
    assert found["worker-0-ab"].startswith("worker-0 finds less than half of the cached tokens")
    for _ in range(100):
        expectations.add("m", "worker-0-ab", 1000, [1000], [1000])
    assert expectations.wrong() == {}


def test_a_worker_that_left_is_no_longer_named() -> None:
    expectations = CacheExpectations()
    for _ in range(MIN_REQUESTS):
        expectations.add("m", "worker-0-ab", 1000, [1000], [0])
    expectations.retain({"worker-0-ab"})
    assert expectations.wrong()
    expectations.retain({"worker-0-cd"})
    assert expectations.wrong() == {}


def test_all_requests_count_for_the_totals_of_a_worker() -> None:
    expectations = CacheExpectations()
    expectations.add("m", "w-0-ab", 48, [32, 16], [32, 0])
    expectations.add("m", "w-0-ab", 0, [0], [64])
    [(model, worker, total)] = expectations.totals()
    assert (model, worker, total.requests) == ("m", "w-0", 2)
    assert (total.expected, total.served, total.difference) == ([32, 16], [96, 0], [64, -16])
    assert (total.unexpected, total.missing) == (64, 16)
