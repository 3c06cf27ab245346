"""A scheduler of vLLM whose steps take longer, as on a slower device.

The time does not depend on how busy the machine is that runs the tests.
"""

import os
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

STEP_S, TOKEN_S = "TEST_DELAY_STEP_S", "TEST_DELAY_TOKEN_S"


class DelayedScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Waits in each step, and for each token that the step computes."""

    def schedule(self, *args: Any, **fields: Any) -> Any:
        output = super().schedule(*args, **fields)
        tokens = output.total_num_scheduled_tokens
        if tokens:
            time.sleep(float(os.environ[STEP_S]) + tokens * float(os.environ[TOKEN_S]))
        return output
