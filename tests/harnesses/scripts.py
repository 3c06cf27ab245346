"""The mock engine's output for each client: raw output in the hermes format."""

import json

Entry = dict[str, str | int]


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def call(name: str, **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def loop(task: str, first: str, proof: str, last: str) -> list[Entry]:
    """Two turns: a tool call answers the task, and a text answers its result."""
    return [
        {"match": task, "turn": 0, "text": first},
        {"match": proof, "turn": 1, "text": last},
    ]


def shell(tool: str, key: str, name: str, **more: object) -> str:
    """Think, announce it, and write `name` into a file of that name."""
    command = f"echo made-by-{name} > {name}.txt && cat {name}.txt"
    written = call(tool, **{key: command}, **more)
    return f"{thought('I write the file first.')}I make the file.\n{written}"


def files(name: str, tool: str, key: str, **more: object) -> list[Entry]:
    """The loop in which a client creates a file with its shell tool."""
    last = f"{thought('It is there.')}The file {name}.txt is made."
    return loop(f"make {name}\\.txt", shell(tool, key, name, **more), f"made-by-{name}", last)


SUBTASK = call("Bash", command="echo counted-by-helper", description="Count")
SUMMARY = "<analysis>\nLittle.\n</analysis>\n<summary>\nA file was made.\n</summary>"

CLAUDE: list[Entry] = [
    {"match": "an <analysis> block followed by a <summary> block", "text": SUMMARY},
    {"match": "What next", "text": "Nothing more."},
    *files("claude", "Bash", "command", description="Make the file"),
    *files("again", "Bash", "command", description="Make the file"),
    {
        "match": "Ask a helper",
        "turn": 0,
        "text": call("Agent", description="Count", prompt="Count them", run_in_background=False),
    },
    *loop("Count them", SUBTASK, "counted-by-helper", "The helper counts none."),
    {"match": "The helper counts none", "turn": 1, "text": "There are none."},
    {"match": "Load a tool", "turn": 0, "text": call("ToolSearch", query="select:CronList")},
    {"match": "Load a tool", "turn": 1, "text": call("CronList")},
    {"match": "Load a tool", "turn": 2, "text": "Nothing is planned."},
]

PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+made-by-patch\n*** End Patch\n"
WAIT = "until [ -e counted.txt ]; do sleep 0.1; done; echo there"

CODEX: list[Entry] = [
    {"match": "CONTEXT CHECKPOINT COMPACTION", "text": "A file was made."},
    *files("codex", "exec_command", "cmd"),
    {"match": "Patch it", "turn": 0, "text": call("apply_patch", input=PATCH)},
    {"match": "Patch it", "turn": 1, "text": "It is patched."},
    {
        "match": "Spawn one",
        "turn": 0,
        "text": call("multi_agent_v1__spawn_agent", message="Do the count"),
    },
    {"match": "Spawn one", "turn": 1, "text": call("exec_command", cmd=WAIT)},
    {"match": "Spawn one", "text": "The other has counted."},
    *loop("Do the count", call("exec_command", cmd="echo 3 > counted.txt"), "code 0", "Counted."),
    *loop("Count far", call("exec_command", cmd="seq 3000"), "2999", "That was far."),
]

SCRIPT: list[Entry] = [
    *CLAUDE,
    *CODEX,
    {"match": "You are a title generator", "turn": 0, "text": "Making a file"},
    *files("opencode", "bash", "command", description="Make the file"),
    {
        "match": "Delegate it",
        "turn": 0,
        "text": call("task", description="Say", prompt="Report back", subagent_type="general"),
    },
    {"match": "Report back", "turn": 0, "text": "Reported by the other."},
    {"match": "Reported by the other", "turn": 1, "text": "It is delegated."},
]
