"""The variables of a vLLM that runs with `delayed_scheduler.DelayedScheduler`."""

import os
from pathlib import Path

SCHEDULER = "support.delayed_scheduler.DelayedScheduler"


def delayed(step_s: float, token_s: float) -> dict[str, str]:
    """A step takes `step_s` longer, and `token_s` for each of its tokens."""
    tests = str(Path(__file__).parent.parent)
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "TEST_DELAY_STEP_S": str(step_s),
        "TEST_DELAY_TOKEN_S": str(token_s),
        "PYTHONPATH": os.pathsep.join(paths),
    }
