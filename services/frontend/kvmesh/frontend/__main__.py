"""Runs one frontend process with settings from the environment; `prefork` starts it."""

import os
import sys

from kvmesh.frontend.service import main, meanwhile
from kvmesh.runtime.service import run_service
from kvmesh.settings import load

if __name__ == "__main__":
    settings = load(None, os.environ, {})
    sys.exit(run_service("frontend", settings.frontend.name, settings, main, None, meanwhile))
