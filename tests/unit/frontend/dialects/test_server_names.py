"""The names that users of other servers know are accepted, and the documentation lists them."""

from itertools import groupby
from pathlib import Path

import pytest
from unit.frontend.dialects.outputs import chosen

from kvmesh.frontend.dialects.families import CHANNELS, REASONING_PARSERS, TOOL_PARSERS

DOCS = Path(__file__).parents[4] / "docs"
SERVERS = ("vLLM 0.33.0", "SGLang 0.5.23", "Dynamo 1.6.1")

# What each server's command line accepts, in the order of SERVERS.
TOOL_NAMES = (
    """
    apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32
    deepseek_v4 deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite
    granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba
    k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo
    minicpm5 minimax_m2 minimax_m3 mistral muse muse_glimmer musespark1x olmo3 openai
    phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3
    step3p5 step5 xlam
    """,
    """
    apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41
    dots gemma4 gigachat3 gigachat35 glm glm45 glm47 gpt-oss hermes hunyuan inkling interns1
    iquest_q1 k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 mimo minicpm5 minimax-m2 minimax-m3
    mistral muse nanbeige poolside_v1 pythonic qwen qwen25 qwen3_coder response_template
    spark25 step3 step3p5 trinity
    """,
    """
    deepseek-v4 deepseek_v3 deepseek_v3_1 deepseek_v3_2 deepseek_v4 deepseek_v41 deepseekv4
    default gemma-4 gemma4 glm45 glm47 harmony hermes inkling jamba kimi-k3 kimi_k2 kimi_k25
    kimi_k3 llama3_json minimax-m3 minimax-m3-nom minimax_m2 minimax_m3 minimax_m3_nom mistral
    muse muse_glimmer nemotron_deci nemotron_nano phi4 pythonic qwen25 qwen3 qwen3_coder
    """,
)
REASONING_NAMES = (
    """
    beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41
    ernie45 gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3
    hy_v4 inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2
    minimax_m2_append_think minimax_m3 mistral muse muse_glimmer musespark1x nemotron_v3 olmo3
    openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 step3p5 step5
    """,
    """
    apertus2509 beam cohere_command4 deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots
    gemma4 gigachat35 glm45 gpt-oss granite_thinking_parser hunyuan inkling interns1 iquest_q1
    k2_horizon kimi kimi_k2 kimi_k3 ling3 mimo minimax minimax-append-think minimax-m3 mistral
    muse nanbeige nemotron_3 poolside_v1 qwen3 qwen3-thinking response_template step3 step3p5
    """,
    """
    basic deepseek-v4 deepseek_r1 deepseek_v3 deepseek_v3_1 deepseek_v3_2 deepseek_v4
    deepseek_v41 deepseekv4 gemma-4 gemma4 glm45 glm47 gpt_oss granite inkling kimi kimi-k3
    kimi_k2 kimi_k25 kimi_k3 minimax-m3 minimax_append_think minimax_m2 minimax_m3 mistral
    muse muse_glimmer nemotron3 nemotron_deci nemotron_nano nemotron_v3 qwen3 qwen3_coder
    step3
    """,
)


def ours(kind: str, name: str) -> str:
    """The parser that an accepted name stands for."""
    if kind == "tool":
        return chosen(name, None).tool_parser or "auto"
    return chosen(None, name).reasoning_parser or "auto"


def table(kind: str, names: tuple[str, ...]) -> list[str]:
    """The rows of the documentation's table of the names of a kind of parser."""
    found = [(ours(kind, n), server, n) for server, each in enumerate(names) for n in each.split()]
    rows = []
    for parser, group in groupby(sorted(found), key=lambda row: row[0]):
        members = list(group)
        cells = [
            ", ".join(f"`{name}`" for _, server, name in members if server == column)
            for column in range(len(SERVERS))
        ]
        rows.append("| " + " | ".join([f"`{parser}`", *cells]) + " |")
    return [row.replace("|  |", "| |").replace("|  |", "| |") for row in rows]


KINDS = pytest.mark.parametrize(
    ("kind", "names"), [("tool", TOOL_NAMES), ("reasoning", REASONING_NAMES)]
)


@KINDS
def test_every_name_of_other_servers_is_accepted(kind: str, names: tuple[str, ...]) -> None:
    for name in " ".join(names).split():
        assert ours(kind, name)


@KINDS
def test_the_documentation_has_each_name_beside_ours(kind: str, names: tuple[str, ...]) -> None:
    page = (DOCS / "parser-names.md").read_text().splitlines()
    assert [row for row in table(kind, names) if row not in page] == []
    assert f"| kvmesh | {' | '.join(SERVERS)} |" in page


def test_the_documentation_names_every_parser() -> None:
    page = (DOCS / "parsers.md").read_text() + (DOCS / "parser-names.md").read_text()
    names = {*TOOL_PARSERS, *CHANNELS, *REASONING_PARSERS, "harmony", "auto", "none"}
    assert [name for name in names if f"`{name}`" not in page] == []
