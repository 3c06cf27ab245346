"""SGLang's detectors behind JSON lines: run by the Python of an environment that has SGLang.

Reads {"parser", "tools", "output"} a line and writes {"text", "calls": [[name, arguments]]}, or
{"error"}. Nothing but the detectors is imported: their package's own imports are replaced.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from pydantic import BaseModel

LIMIT_S = 2  # of computing, for one output
HEAVY = ("torch", "transformers", "xgrammar", "triton", "outlines", "llguidance", "openai")
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.function_call", "sglang.srt.parser")
REAL = (*PACKAGES, "sglang.srt.environ")


class Function(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class OfferedTool(BaseModel):
    type: str = "function"
    function: Function


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces modules that need a GPU, and those of SGLang other than its parsers."""

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = name.startswith("sglang.") and not name.startswith(REAL[2:])
        if name.split(".")[0] in HEAVY or (inside and name not in REAL):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in PACKAGES:
            # the package without its own code
            folder = Path(sys.prefix).glob(f"lib/*/site-packages/{name.replace('.', '/')}")
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(found) for found in folder]
            return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        if spec.name in PACKAGES:
            return None
        stub = MagicMock(name=spec.name)
        stub.__path__, stub.__spec__ = [], spec
        stub.Tool = OfferedTool
        return stub

    def exec_module(self, module: object) -> None:
        pass


def give_up(*_: object) -> None:
    raise TimeoutError("it runs on")


def main() -> None:
    signal.signal(signal.SIGPROF, give_up)
    sys.meta_path.insert(0, Stubs())
    parsers = importlib.import_module("sglang.srt.function_call.function_call_parser")
    detectors = parsers.FunctionCallParser.ToolCallParserEnum
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            detector = detectors[asked["parser"]]()
            tools = [OfferedTool.model_validate(tool) for tool in asked["tools"]]
            found = detector.detect_and_parse(asked["output"], tools)
            calls = [[call.name, call.parameters] for call in found.calls]
            answer: dict[str, Any] = {"text": found.normal_text or "", "calls": calls}
        except Exception as error:  # an oracle's failure is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


main()
