"""Streams chat completions, two a second, until standard input ends; prints what became of them."""

import http.client
import json
import sys
import threading
import time

PERIOD_S, TOKENS = 0.5, 60
address = ("127.0.0.1", 8000)
lock = threading.Lock()
failures: list[str] = []
gaps = [0.0]


def stream(model: str, number: int) -> None:
    try:
        connection = http.client.HTTPConnection(*address, timeout=90)
        message = {"role": "user", "content": f"Count to {number}. " * 50}
        body = {"model": model, "messages": [message], "max_tokens": TOKENS, "stream": True}
        body["stream_options"] = {"include_usage": True}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{response.status} {response.read()[:200]!r}")
        tokens, last, done = 0, time.monotonic(), False
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            with lock:
                gaps.append(now - last)
            last = now
            if line.startswith(b"data: [DONE]"):
                done = True
            elif (usage := json.loads(line[6:]).get("usage")) is not None:
                tokens = usage["completion_tokens"]
        if not done or tokens != TOKENS:
            raise ValueError(f"ended after {tokens} tokens")
    except (OSError, http.client.HTTPException, ValueError) as error:
        with lock:
            failures.append(f"{type(error).__name__}: {error}")


def main() -> None:
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    threads: list[threading.Thread] = []
    while not ended.wait(PERIOD_S):
        threads.append(threading.Thread(target=stream, args=(model, len(threads))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    reasons = sorted(set(failures))[:5]
    found = {"sent": len(threads), "failed": len(failures), "reasons": reasons}
    print(json.dumps({**found, "gap_s": max(gaps)}))


main()
