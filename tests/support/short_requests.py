"""A process of its own that sends short requests, one after another, and prints their outcomes.

Beside a load in the same process it would measure that load's delays as well.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

import httpx


async def main(url: str, key: str, seconds: float) -> dict[str, Any]:
    """Outcomes, and the seconds of each request in order."""
    outcomes: Counter[str] = Counter()
    took: list[float] = []
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=120, headers=headers) as client:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            body = {"model": "kvmesh-demo", "prompt": f"Short {len(took)}. " * 4, "max_tokens": 8}
            began = time.monotonic()
            reply = await client.post(f"{url}/v1/completions", json=body)
            took.append(time.monotonic() - began)
            whole = reply.status_code == 200
            outcomes["whole" if whole else f"{reply.status_code} {reply.text}"] += 1
            if not whole:
                await asyncio.sleep(1)
    return {"outcomes": outcomes, "seconds": took}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))))
