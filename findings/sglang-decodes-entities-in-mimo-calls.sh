#!/bin/sh
# SGLang 0.5.23 decodes HTML entities in the parameter values of MiMo's calls. MiMo's template writes values without encoding, so a model that
# edits a web page and means `&lt;` gets `<` into the file. The detector of the same form for Qwen3-Coder keeps the text.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet msgspec==0.22.0 orjson partial-json-parser pydantic==2.14.4 regex
venv/bin/pip install --quiet --no-deps sglang==0.5.23
cat > program.py <<'EOF'
import importlib.abc, importlib.machinery, json, pathlib, sys, sysconfig
from types import SimpleNamespace
from unittest.mock import MagicMock

class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The engine and its libraries, which a detector imports and does not need."""

    folders = ("sglang", "sglang.srt", "sglang.srt.function_call")

    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        if name in self.folders:
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(pathlib.Path(sysconfig.get_path("purelib"), *name.split(".")))]
            return spec
        if top in ("torch", "transformers", "xgrammar") or top == "sglang" and not name.startswith((*self.folders[2:], "sglang.srt.environ")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None if spec.name in self.folders else MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Stubs())
from sglang.srt.function_call.mimo_detector import MiMoDetector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector

TEXT = "<p>if a &lt; b &amp;&amp; c</p>"
OUTPUT = "<tool_call>\n<function=write>\n<parameter=text>{}</parameter>\n</function>\n</tool_call>"
schema = {"type": "object", "properties": {"text": {"type": "string"}}}
tools = [SimpleNamespace(type="function", function=SimpleNamespace(name="write", description="Write.", parameters=schema, strict=False))]
found = []
for detector, written in ((MiMoDetector, TEXT), (Qwen3CoderDetector, f"\n{TEXT}\n")):
    (call,) = detector().detect_and_parse(OUTPUT.format(written), tools).calls
    found.append(json.loads(call.parameters)["text"])
    print(f"{detector.__name__}: the model wrote {TEXT!r}, the tool gets {found[-1]!r}")
same = found == ["<p>if a < b && c</p>", TEXT]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
