"""Options, Hypothesis settings and failure reports of all tests."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from support import evidence

# A shared machine may be slow at any moment, so the duration of an example says nothing.
EXAMPLES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", EXAMPLES)
settings.register_profile("many", EXAMPLES, max_examples=3000)
# On CI a change is judged by the examples that it was tested with; other runs look for new ones.
settings.register_profile("repeatable", EXAMPLES, derandomize=True)
settings.load_profile("random")

# Threads of the algebra library only spin on small matrices; it reads this when it is first
# loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# aiohttp loads the certificates of public authorities when it is imported, a fifth of a process's
# start; no test meets a server that these vouch for.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)

# With CI set pytest explains every failed comparison in full, which for large values takes minutes;
# `eventually` sees many of those before one holds.
os.environ.pop("CI", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=20, help="number of simulation seeds to run")
    parser.addoption("--seed", type=int, help="run only this simulation seed and print its log")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the modules and tests, which live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A soak takes the time that it is given: the limit of a single test does not hold for it."""
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the output of the test's processes to the report of a failure."""
    report = yield
    if report.failed:
        report.sections.extend(evidence.sections())
    return report
