"""Lines written in a thread: bounded, in order, and without a wait for their reader."""

import os

from kvmesh.runtime.line_writer import LIMIT, MAX_UNREAD, LineWriter, _unread


def test_a_reader_that_does_not_read_delays_nobody_and_loses_no_line_silently() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing)
    for number in range(3 * LIMIT):  # returns though the pipe holds a part of them
        writer.put(f"line {number}")
    assert _unread(writing) <= MAX_UNREAD + 4096
    text = b""
    while not text.endswith(b"last\n"):
        text += os.read(reading, 1 << 16)
        if b"dropped" not in text:
            writer.put("more")
        else:
            writer.put("last")
    lines = text.decode().splitlines()
    kept = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert kept == sorted(kept)
    assert len(kept) >= LIMIT
    dropped = sum(int(line.split()[0]) for line in lines if "dropped" in line)
    assert dropped >= 3 * LIMIT - len(kept)
    writer.close(60)
    os.close(reading)
    os.close(writing)
