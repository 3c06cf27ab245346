"""Outputs as the families' templates write them, from thinking, text and calls."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from unit.frontend.dialects.outputs import CODE, TOOLS, WEATHER, Piece, chosen, dump

from kvmesh.frontend.dialects.output import OutputParser

Arguments = dict[str, Any]
NESTED = {"city": "Rom", "where": {"x": 1.5, "l": [1, {"y": "z"}]}, "tags": []}
ESCAPES = {"path": "a & b\n", "content": 'x = "\\n" # <a href=\'/b\'> {"c": [1]}\n\n\tend'}
# Calls of an output, in order.
CALLS: list[list[tuple[str, Arguments]]] = [
    [("get_weather", WEATHER), ("write", CODE)],
    [("now", {})],
    [("write", ESCAPES), ("now", {}), ("get_weather", NESTED)],
]


class Family(NamedTuple):
    """`thinking`, `text` and `call` write one part; `calls` are what surrounds and joins calls."""

    tool: str
    reasoning: str | None
    call: Callable[[int, str, Arguments], str]
    calls: tuple[str, str, str] = ("", "", "")
    text: str = "{}"
    thinking: str = "<think>{}</think>"
    end: str = ""

    @property
    def title(self) -> str:
        return f"{self.tool}-{self.reasoning}-{len(self.text)}"

    @property
    def starts_thinking(self) -> bool:
        """True if the output begins with thinking without a mark."""
        return self.thinking.startswith("{}")

    def write(self, parts: list[Piece]) -> str:
        """The output with these parts; calls follow each other."""
        written, calls = [], [p for p in parts if p[0] == "call"]
        for part in parts:
            if part[0] == "call":
                begin, between, end = self.calls
                each = [self.call(i, name, args) for i, (_, name, args) in enumerate(calls)]
                written.append(begin + between.join(each) + end)
                break
            form = self.text if part[0] == "text" else self.thinking
            written.append(form.format(part[2]))
        return "".join(written) + self.end

    @property
    def parser_names(self) -> tuple[str | None, str | None]:
        grammar = chosen(self.tool, self.reasoning)
        return grammar.tool_parser, grammar.reasoning_parser

    def parser(self, eager: bool = True, tools: bool = True) -> OutputParser:
        grammar = chosen(self.tool, self.reasoning)
        offered = TOOLS if tools else []
        return grammar.parser(offered, eager=eager, calls=tools, new_id=lambda: "id")


def _json(form: str, names: tuple[str, str] = ("name", "arguments")) -> Callable[..., str]:
    def call(number: int, name: str, arguments: Arguments) -> str:
        return form.replace("@", dump({names[0]: name, names[1]: arguments}))

    return call


def _named(form: str) -> Callable[..., str]:
    """`form` with N for the number, NAME and ARGS."""

    def call(number: int, name: str, arguments: Arguments) -> str:
        text = form.replace("#", str(number)).replace("NAME", name)
        return text.replace("ARGS", dump(arguments))

    return call


def _tagged(
    begin: str, argument: str, end: str, kind: Callable[[Any], str] = lambda value: ""
) -> Callable[..., str]:
    """`begin` with NAME and # for the number; `argument` with KEY, KIND and VALUE."""

    def call(number: int, name: str, arguments: Arguments) -> str:
        written = begin.replace("NAME", name).replace("#", str(number + 1))
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else dump(value)
            tag = argument.replace("KEY", key).replace("KIND", kind(value))
            written += tag.replace("VALUE", shown)
        return written + end

    return call


def _is_string(value: Any) -> str:
    return json.dumps(isinstance(value, str))


def _kind(value: Any) -> str:
    names = {str: "string", bool: "boolean", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _elements(number: int, name: str, arguments: Arguments) -> str:
    ns = "]<]minimax[>["

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "".join(f"{ns}<{k}>{value(v)}{ns}</{k}>" for k, v in item.items())
        if isinstance(item, list):
            return "".join(f"{ns}<item>{value(v)}{ns}</item>" for v in item)
        return item if isinstance(item, str) else dump(item)

    return f'{ns}<invoke name="{name}">{value(arguments)}{ns}</invoke>\n'


def _cdata(number: int, name: str, arguments: Arguments) -> str:
    def value(item: Any) -> str:
        shown = item if isinstance(item, str) else str(item)
        return f"<![CDATA[{shown}]]>" if set(shown) & set("<&\n") else shown

    inner = "".join(f'<param name="{k}">{value(v)}</param>' for k, v in arguments.items())
    return f'<function name="{name}">{inner}</function>'


def _name_keys(number: int, name: str, arguments: Arguments) -> str:
    return dump({name: arguments})


_FUNCTION = _tagged("<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>")


def _dsml(tag: str) -> Callable[..., str]:
    return _tagged(
        f'<{tag}invoke name="NAME">\n',
        f'<{tag}parameter name="KEY" string="KIND">VALUE</{tag}parameter>\n',
        f"</{tag}invoke>\n",
        _is_string,
    )


def _hunyuan(suffix: str, sep: str) -> Callable[..., str]:
    return _tagged(
        f"\n<tool_call{suffix}>NAME{sep}\n",
        f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>VALUE</arg_value{suffix}>\n",
        f"</tool_call{suffix}>",
    )


_HUNYUAN = ("<tool_calls:opensource>", "", "\n</tool_calls:opensource>")
_IFM = ("<ifm|tool_calls>", "\n", "</ifm|tool_calls>")
_MUSE = "<|start|>assistant to=NAME<|message|><atem:function_calls>\n"

FAMILIES = [
    Family(
        "jamba",
        "apriel",
        _json("@"),
        ("\n<tool_calls>[", ", ", "]</tool_calls>"),
        "{}",
        "Here are my reasoning steps:\n{}\n[BEGIN FINAL RESPONSE]\n",
        "\n[END FINAL RESPONSE]",
    ),
    Family(
        "granite",
        "granite",
        _json("@"),
        ("<|tool_call|>[", ", ", "]"),
        "<response>{}</response>",
    ),
    Family(
        "cohere_command",
        "cohere_command3",
        lambda number, name, arguments: dump(
            {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
        ),
        ("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        "<|START_RESPONSE|>{}<|END_RESPONSE|>",
        "<|START_THINKING|>{}<|END_THINKING|>",
    ),
    Family(
        "cohere_command4",
        "cohere_command4",
        _json("@", ("tool_name", "parameters")),
        ("<|START_ACTION|>[", ", ", "]<|END_ACTION|>"),
        "<|START_TEXT|>{}<|END_TEXT|>",
        "<|START_THINKING|>{}<|END_THINKING|>",
    ),
    Family(
        "apertus",
        "apertus2509",
        _name_keys,
        ("<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
        thinking="<|inner_prefix|>{}<|inner_suffix|>",
    ),
    Family(
        "hunyuan_a13b",
        "hunyuan_a13b",
        _json("@"),
        ("<tool_calls>[", ", ", "]</tool_calls>"),
        "<answer>\n{}\n</answer>",
        "<think>\n{}\n</think>\n",
    ),
    Family(
        "hy_v3",
        "hunyuan",
        _hunyuan(":opensource", "<tool_sep:opensource>"),
        _HUNYUAN,
        thinking="<think:opensource>{}</think:opensource>",
    ),
    Family("hy_v4", "hy_v4", _hunyuan("", ""), ("<tool_calls>", "", "\n</tool_calls>")),
    Family(
        "ernie45",
        "ernie45",
        _json("<tool_call>\n@\n</tool_call>"),
        ("", "\n", "\n"),
        "<response>\n{}\n</response>\n",
        "{}\n</think>\n\n\n",
    ),
    Family(
        "internlm",
        "interns1",
        _json("<|action_start|> <|plugin|>\n@<|action_end|>", ("name", "parameters")),
        ("", "\n", ""),
    ),
    Family("internlm", None, _json("\n<|action_start|><|plugin|>\n@<|action_end|>")),
    Family("xlam", "basic", _json("@"), ("\n\n```json\n[", ", ", "]\n```")),
    Family("xlam", "basic", _json("@"), ("<tool_call>[", ",", "]</tool_call>")),
    Family(
        "longcat",
        "longcat",
        _json("<longcat_tool_call>\n@\n</longcat_tool_call>\n"),
        thinking="<longcat_think>{}</longcat_think>",
    ),
    Family(
        "longcat",
        "longcat",
        _tagged(
            "<longcat_tool_call>NAME\n",
            "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>\n",
            "</longcat_tool_call>\n",
        ),
        thinking="<longcat_think>\n{}\n</longcat_think>\n",
    ),
    Family("gigachat3", None, _json("<|function_call|>@"), ("", "\n", "<|message_sep|>")),
    Family(
        "gigachat3",
        None,
        _json("@"),
        ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "\n", "<|message_sep|>"),
    ),
    Family(
        "gigachat35",
        "gigachat35",
        _dsml("｜GCML｜"),
        ("\n\n<｜GCML｜tool_calls>\n", "", "</｜GCML｜tool_calls><|message_sep|>"),
        thinking="{}</think>",
    ),
    Family(
        "deepseekv41",
        "deepseek_v41",
        _dsml("｜DSML｜ "),
        ("\n\n<｜DSML｜ calls>\n", "", "</｜DSML｜ calls>"),
    ),
    Family("granite-20b-fc", None, _json("<function_call> @"), ("", "\n", "\n")),
    Family(
        "plamo3",
        "plamo3",
        _named(
            "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME"
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
            "<|plamo:constrain|>json<|plamo:msg|>ARGS<|plamo:end_tool_arguments:plamo|>"
            "<|plamo:end_tool_request:plamo|>"
        ),
        ("<|plamo:begin_tool_requests:plamo|>", "", "<|plamo:end_tool_requests:plamo|>"),
        thinking="<|plamo:begin_think:plamo|>{}<|plamo:end_think:plamo|>",
    ),
    Family(
        "seed_oss",
        "seed_oss",
        lambda n, name, args: f"<seed:tool_call>\n{_FUNCTION(n, name, args)}\n</seed:tool_call>\n",
        ("\n\n", "", ""),
        thinking="<seed:think>{}</seed:think>",
    ),
    Family(
        "mimo",
        "mimo",
        _tagged("<tool_call>\n<function=NAME>", "<parameter=KEY>VALUE</parameter>", "</function>"),
        ("", "\n</tool_call>\n", "\n</tool_call>"),
    ),
    Family(
        "dots",
        "dots",
        _tagged(
            '<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n"
        ),
        ("<dots_function_call>\n", "", "</dots_function_call>"),
    ),
    Family("dots", "dots", _json("<dots_function_call>@</dots_function_call>")),
    Family("minicpm5", "qwen3", _cdata, ("\n", "\n", "")),
    Family(
        "iquest_q1",
        "iquest_q1",
        _tagged(
            "<iquest_tool_call>NAME\n",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            "</iquest_tool_call>\n",
        ),
        thinking="{}</think>",
    ),
    Family(
        "k2_horizon",
        "k2_horizon",
        _tagged(
            "<ifm|tool_call>NAME\n",
            "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>VALUE</ifm|arg_value>\n",
            "</ifm|tool_call>",
        ),
        _IFM,
        thinking="<ifm|think_fast>{}</ifm|think_fast>",
    ),
    Family(
        "k2_horizon",
        "k2_horizon",
        _tagged(
            "<ifm|tool_call>NAME\n",
            "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_type>KIND</ifm|arg_type>\n"
            "<ifm|arg_value>VALUE</ifm|arg_value>\n",
            "</ifm|tool_call>",
            _kind,
        ),
        _IFM,
        thinking="<ifm|think>\n{}\n</ifm|think>\n",
    ),
    Family(
        "k2_horizon",
        "k2_horizon",
        _json("<ifm|tool_call>@</ifm|tool_call>"),
        _IFM,
        thinking="<ifm|think_faster>{}</ifm|think_faster>",
    ),
    Family(
        "kimi_k3",
        "kimi_k3",
        _tagged(
            '<|open|>call tool="NAME" index="#"<|sep|>',
            '<|open|>argument key="KEY" type="KIND"<|sep|>VALUE<|close|>argument<|sep|>',
            "<|close|>call<|sep|>",
            _kind,
        ),
        ("<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
        "<|open|>response<|sep|>{}<|close|>response<|sep|>",
        "<|open|>think<|sep|>{}<|close|>think<|sep|>",
        "<|close|>message<|sep|>",
    ),
    Family(
        "kimi_k3",
        "kimi_k3",
        _named(
            '<|open|>call tool="NAME" index="#"<|sep|><|open|>json type="object"<|sep|>ARGS'
            "<|close|>json<|sep|><|close|>call<|sep|>"
        ),
        ("<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
        "<|open|>response<|sep|>{}<|close|>response<|sep|>",
        "<|open|>think<|sep|>{}<|close|>think<|sep|>",
    ),
    Family(
        "minimax_m3",
        "minimax_m3",
        _elements,
        ("]<]minimax[>[<tool_call>\n", "", "]<]minimax[>[</tool_call>"),
        thinking="<mm:think>{}</mm:think>",
    ),
    Family(
        "muse",
        "muse",
        _tagged(
            f'{_MUSE}<atem:invoke name="NAME">\n',
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
            "</atem:invoke>\n</atem:function_calls>",
        ),
        ("", "<|eom|>", "<|eot|>"),
        "<|start|>assistant to=user<|message|>{}<|eom|>",
        " to=self<|message|>{}<|eom|>",
    ),
    Family(
        "inkling",
        "inkling",
        lambda number, name, arguments: (
            f"<|message_model|>{name}<|content_invoke_tool_json|>"
            f"{dump({'name': name, 'args': arguments})}<|end_message|>"
        ),
        text="<|message_model|><|content_text|>{}<|end_message|>",
        thinking="<|content_thinking|>{}<|end_message|>",
    ),
    Family(
        "beam",
        "beam",
        _tagged(
            "<|start|>assistant to=NAME<|channel|>analysis <|constrain|>xml<|message|>",
            '<rfl:parameter name="KEY">\nVALUE\n</rfl:parameter>\n',
            "<|end|>",
        ),
        text="<|start|>assistant<|channel|>final<|message|>{}<|end|>",
        thinking="<|channel|>analysis<|message|>{}<|end|>",
    ),
    Family(
        "solar_open",
        "solar_open",
        _named(
            "<|tool_call:begin|>call_#<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>"
        ),
        ("<|begin|>assistant<|tool_calls|>", "", "<|calls|>"),
        "<|begin|>assistant<|content|>{}<|end|>",
        "<|think|>{}<|end|>",
    ),
    Family("functionary_v3_2", None, _named(">>>NAME\nARGS"), text="all\n{}"),
    Family("xlam", "basic", _json("@"), ("[", ", ", "]"), text=""),
]
