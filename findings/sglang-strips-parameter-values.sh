#!/bin/sh
# DeepSeek V3.2, V4 and V4.1 write text arguments verbatim between tags, and DeepSeek's own deepseek-recipe 0.2.0 reads them so.
# SGLang 0.5.23 strips each one: the indentation before the first line and the newline behind the last are lost, streamed or not.
# An agent's edit tool then gets an `old_string` that does not stand in the file so, or a `new_string` without its indentation.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet deepseek-recipe==0.2.0 msgspec==0.22.0 orjson partial-json-parser pydantic==2.14.4 regex
venv/bin/pip install --quiet --no-deps sglang==0.5.23
cat > program.py <<'EOF'
import importlib.abc, importlib.machinery, json, pathlib, sys, sysconfig
from types import SimpleNamespace
from unittest.mock import MagicMock

from deepseek_recipe import (
    ChatCompletionRequest, ConversionOptions, InferenceChunk, InferenceFinishReason, ParsingOptions, StreamProcessor)

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
from sglang.srt.function_call.deepseekv4_detector import DeepSeekV4Detector

TEXT = "    if ready:\n        go()\n"
OUTPUT = f"""<｜DSML｜tool_calls>
<｜DSML｜invoke name="edit">
<｜DSML｜parameter name="old_string" string="true">{TEXT}</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
schema = {"type": "object", "properties": {"old_string": {"type": "string"}}}
function = {"name": "edit", "description": "Edit.", "parameters": schema}


def deepseek():
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "Go"}], "tools": [{"type": "function", "function": function}]}
    request = ChatCompletionRequest(body).convert(ConversionOptions(default_thinking_mode=False))
    processor = StreamProcessor(ChatCompletionRequest.chunk_generator(request, "id", "m"), ParsingOptions())
    pushed = [InferenceChunk.ready(), InferenceChunk.text(OUTPUT), InferenceChunk.finish(InferenceFinishReason.Stop)]
    chunks = [chunk for each in pushed for chunk in processor.push(each)] + processor.finish()
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk.to_json())["choices"]]
    return "".join(call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls") or [])


def sglang():
    tools = [SimpleNamespace(type="function", function=SimpleNamespace(strict=False, **function))]
    return DeepSeekV4Detector().detect_and_parse(OUTPUT, tools).calls[0].parameters


found = [json.loads(read())["old_string"] for read in (deepseek, sglang)]
print(f"the model wrote {TEXT!r}\ndeepseek-recipe {found[0]!r}\nSGLang          {found[1]!r}")
same = found == [TEXT, TEXT.strip()]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
