"""Processes whose wall clock is wrong: a preloaded library adds seconds to it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) {
    const char *text = getenv("TEST_CLOCK_AHEAD_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && id == CLOCK_REALTIME) now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = real(now, zone);
    if (!failed) now->tv_sec += ahead();
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def clock_library(folder: Path) -> Path | None:
    """The library, compiled into `folder`; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60
    )
    return library


def start(
    role: str, env: Mapping[str, str], library: Path, ahead_s: int, log: Path
) -> "subprocess.Popen[bytes]":
    """Start one service as a process of its own, with its clock `ahead_s` seconds ahead."""
    command = Path(sys.executable).with_name("kvmesh")
    preload = {"LD_PRELOAD": str(library), "TEST_CLOCK_AHEAD_S": str(ahead_s)}
    with log.open("ab") as file:
        return subprocess.Popen(
            [command, role], env={**os.environ, **env, **preload}, stdout=file, stderr=file
        )
