"""The mock engine's output for long sessions: calls in the forms that clients rewrite.

Each answer holds a label, CLIENT-N, and the next answer of the tour matches it: the newest label
at the end of a prompt decides. So a tour goes on after a resume, whatever the user writes.
"""

import json
from collections.abc import Callable
from pathlib import Path

from harnesses.scripts import Entry

LINES = 44
EDITED = (7, 17, 27)
MANY = "".join(f"Line {n}: a café, naïve and plain.  \n" for n in range(LINES))


def written(name: str, arguments: object, form: Callable[[object], str] = json.dumps) -> str:
    """A call, its arguments in the order given; `form` renders them."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {form(arguments)}}}\n</tool_call>'


def compact(arguments: object) -> str:
    return json.dumps(arguments, separators=(",", ":"))


def plain(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def changed(at: int) -> str:
    """The text that an edit writes in place of line `at`."""
    return "".join(f'    value_{at}_{n} = compute("é", {n})\n' for n in range(LINES))


def line(at: int, end: str = "  \n") -> str:
    """Line `at` of `MANY`; Claude Code has cut the blanks at its end."""
    return f"Line {at}: a café, naïve and plain.{end}"


def step(text: str, *calls: str) -> str:
    thinking = f"<think>\nI consider what is left to do.\n\nSo next: {text}\n</think>\n\n"
    return "\n".join([f"{thinking}{text}", *calls])


def tour(name: str, task: str, answers: list[str]) -> list[Entry]:
    """Entries that give `answers` one after another, the first to `task`, the last ever after."""
    labelled = [answer.replace("LABEL", f"{name}-{n}") for n, answer in enumerate(answers)]
    matches = [task, *(f"{name}-{n}\\b" for n in range(len(answers)))]
    labelled.append(labelled[-1])
    pairs = zip(matches, labelled, strict=True)
    return [{"match": match, "text": text} for match, text in reversed([*pairs])]


def claude(cwd: Path) -> list[Entry]:
    file = f"{cwd}/notes.txt"
    edits = [
        {"new_string": changed(at), "old_string": line(at, "\n"), "file_path": file}
        for at in EDITED
    ]
    count = {
        "description": "Count lines",
        "command": f"cd {cwd} && wc -l notes.txt",
        "timeout": "5000",
    }
    again = {"description": "List", "command": f"cd {cwd} && ls", "timeout": 9000.0}
    helper = "Measure it, helper"
    agents = [
        {"prompt": f"{helper} {n}", "description": f"Measure {n}", "run_in_background": False}
        for n in ("one", "two")
    ]
    helped = [
        step(
            "HELPED I look.", written("Bash", {"description": "Echo", "command": "echo measured"})
        ),
        step("HELPED It is measured."),
    ]
    answers = [
        step("I write notes (LABEL).", written("Write", {"content": MANY, "file_path": file})),
        *(step("I edit them (LABEL).", written("Edit", edit)) for edit in edits),
        step("I count them (LABEL).", written("Bash", count)),
        step("I read (LABEL).", written("Read", {"offset": "1", "limit": 2.0, "file_path": file})),
        step(
            "I load a tool (LABEL).", written("ToolSearch", {"query": "select:mcp__big__tool_07"})
        ),
        step(
            "I ask it (LABEL).",
            written("mcp__big__tool_07", {"days": "3", "city": "Orléans"}, compact),
        ),
        step("I ask helpers (LABEL).", *(written("Agent", agent) for agent in agents)),
        step("That was the tour (LABEL)."),
        step("I list them (LABEL).", written("Bash", again)),
        step("There is a file (LABEL)."),
    ]
    summary = "<analysis>\nLittle.\n</analysis>\n<summary>\nNotes were made.\n</summary>"
    return [
        {"match": "an <analysis> block followed by a <summary> block", "text": summary},
        {"match": "hook-check", "text": '{"ok": true}'},
        {"match": "What next", "text": "Nothing more (claude-end)."},
        *tour("claude", "Tour of claude", answers),
        {"match": "HELPED I look", "text": helped[1]},
        {"match": helper, "text": helped[0]},
    ]


def codex(cwd: Path) -> list[Entry]:
    patch = "*** Begin Patch\n*** Add File: patched.txt\n"
    patch += "".join(f"+{line}\n" for line in MANY.splitlines()) + "*** End Patch\n"
    count = {"yield_time_ms": 5000, "cmd": "wc -l patched.txt; echo café"}
    spawn = [{"message": f"Measure it, other {n}"} for n in ("one", "two")]
    wait = "until [ -e one.txt ] && [ -e two.txt ]; do sleep 0.1; done; echo both"
    helped: list[Entry] = [
        {
            "match": f"Measure it, other {n}",
            "text": step("HELPED", written("exec_command", {"cmd": f"echo 3 > {n}.txt"})),
        }
        for n in ("one", "two")
    ]
    return [
        {"match": "CONTEXT CHECKPOINT COMPACTION", "text": "Files were made (codex-8)."},
        *tour(
            "codex",
            "Tour of codex",
            [
                step("I patch (LABEL).", written("apply_patch", {"input": patch}, plain)),
                step("I count (LABEL).", written("exec_command", count, compact)),
                step("I ask (LABEL).", written("mcp__big__tool_07", {"city": "Orléans"}, compact)),
                step("I read (LABEL).", written("exec_command", {"cmd": "head -n 3 patched.txt"})),
                step(
                    "Others help (LABEL).",
                    *(written("multi_agent_v1__spawn_agent", each) for each in spawn),
                ),
                step("I wait (LABEL).", written("exec_command", {"cmd": wait}, compact)),
                step("That was the tour (LABEL)."),
                step("I list (LABEL).", written("exec_command", {"cmd": "ls"}, compact)),
                step("There is a file (LABEL)."),
                step("Nothing more (LABEL)."),
            ],
        ),
        {"match": "HELPED", "text": step("The other has measured.")},
        *helped,
    ]


def opencode(cwd: Path) -> list[Entry]:
    file = f"{cwd}/notes.txt"
    edits = [{"newString": changed(at), "oldString": line(at), "filePath": file} for at in EDITED]
    count = {"description": "Count lines", "command": "wc -l notes.txt", "timeout": 5000.0}
    tasks = [
        {"prompt": f"Report back, {n}", "subagent_type": "general", "description": f"Say {n}"}
        for n in ("one", "two")
    ]
    return [
        {"match": "You are a title generator", "text": "A tour"},
        {"match": "anchored summary", "text": "Files were made (opencode-9)."},
        *tour(
            "opencode",
            "Tour of opencode",
            [
                step("I write (LABEL).", written("write", {"content": MANY, "filePath": file})),
                *(step("I edit (LABEL).", written("edit", edit)) for edit in edits),
                step("I count (LABEL).", written("bash", count, compact)),
                step("I ask (LABEL).", written("big_tool_07", {"days": 3.0, "city": "Orléans"})),
                step("Others help (LABEL).", *(written("task", each, compact) for each in tasks)),
                step("That was the tour (LABEL)."),
                step("I list (LABEL).", written("bash", {"description": "List", "command": "ls"})),
                step("There is a file (LABEL)."),
                step("Nothing more (LABEL)."),
            ],
        ),
        {"match": "HELPED", "text": step("The other has reported.")},
        {
            "match": "Report back, (one|two)",
            "text": step("HELPED", written("bash", {"description": "Echo", "command": "echo 3"})),
        },
    ]


def pi(cwd: Path) -> list[Entry]:
    file = f"{cwd}/notes.txt"
    edits = [
        {"edits": [{"newText": changed(at), "oldText": line(at)}], "path": file} for at in EDITED
    ]
    count = {"timeout": "50", "command": "wc -l *.txt"}
    return [
        {"match": "context summarization assistant", "text": "Files were made (pi-8)."},
        *tour(
            "pi",
            "Tour of pi",
            [
                step("I write (LABEL).", written("write", {"content": MANY, "path": file})),
                *(step("I edit (LABEL).", written("edit", edit)) for edit in edits),
                step("I count (LABEL).", written("bash", count)),
                step("I read (LABEL).", written("read", {"limit": 2.0, "path": file}, compact)),
                step("That was the tour (LABEL)."),
                step("I list (LABEL).", written("bash", {"timeout": 9.0, "command": "ls"})),
                step("There is a file (LABEL)."),
                step("Nothing more (LABEL)."),
            ],
        ),
    ]


def qwen(cwd: Path) -> list[Entry]:
    file = f"{cwd}/notes.txt"
    edits = [
        {"new_string": changed(at), "old_string": line(at), "file_path": file} for at in EDITED
    ]
    count = {"is_background": False, "description": "Count", "command": "wc -l notes.txt"}
    return tour(
        "qwen",
        "Tour of qwen",
        [
            step("I write (LABEL).", written("write_file", {"content": MANY, "file_path": file})),
            *(step("I edit (LABEL).", written("edit", edit)) for edit in edits),
            step("I count (LABEL).", written("run_shell_command", count, compact)),
            step("I read (LABEL).", written("read_file", {"limit": 2.0, "file_path": file})),
            step("That was the tour (LABEL)."),
            step("I list (LABEL).", written("run_shell_command", {**count, "command": "ls"})),
            step("There is a file (LABEL)."),
        ],
    )


def cline(cwd: Path) -> list[Entry]:
    file = f"{cwd}/notes.txt"
    edits = [{"new_text": changed(at), "old_text": line(at), "path": file} for at in EDITED]
    read = {"files": [{"start_line": 1.0, "path": file, "end_line": 5}]}
    helper = {"task": "Report to cline", "systemPrompt": "You help."}
    return [
        *tour(
            "cline",
            "Tour of cline",
            [
                step("I write (LABEL).", written("editor", {"new_text": MANY, "path": file})),
                *(step("I edit (LABEL).", written("editor", edit)) for edit in edits),
                step("I count (LABEL).", written("run_commands", {"commands": ["wc -l *.txt"]})),
                step("I read (LABEL).", written("read_files", read, compact)),
                step("Another helps (LABEL).", written("spawn_agent", helper)),
                step("That was the tour (LABEL)."),
            ],
        ),
        {"match": "Report to cline", "text": step("The other has reported.")},
    ]


def mini(_: Path) -> list[Entry]:
    commands = [
        f"cat > notes.txt <<'END'\n{MANY}END",
        *(f"sed -i 's/^Line {at}:.*/{at} é/' notes.txt" for at in EDITED),
        "wc -l notes.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    steps = [step("Next (LABEL).", written("bash", {"command": each})) for each in commands]
    return tour("mini", "Tour of mini", steps)


def copilot(cwd: Path) -> list[Entry]:
    file = f"{cwd}/notes.txt"
    edits = [{"new_str": changed(at), "old_str": line(at), "path": file} for at in EDITED]
    count = {"description": "Count", "command": "wc -l notes.txt"}
    tasks = [
        {"prompt": f"Report back, copilot {n}", "agent_type": "task", "description": f"Say {n}"}
        for n in ("one", "two")
    ]
    helpers = [{**each, "name": f"helper-{n}", "mode": "sync"} for n, each in enumerate(tasks)]
    return [
        *tour(
            "copilot",
            "Tour of copilot",
            [
                step("I write (LABEL).", written("create", {"file_text": MANY, "path": file})),
                *(step("I edit (LABEL).", written("edit", edit)) for edit in edits),
                step("I count (LABEL).", written("bash", count, compact)),
                step("I read (LABEL).", written("view", {"view_range": [1, 2.0], "path": file})),
                step("Others help (LABEL).", *(written("task", each) for each in helpers)),
                step("That was the tour (LABEL)."),
                step("I list (LABEL).", written("bash", {**count, "command": "ls"})),
                step("There is a file (LABEL)."),
            ],
        ),
        {"match": "COPILOT HELPED", "text": step("The other has reported.")},
        {
            "match": "Report back, copilot (one|two)",
            "text": step("COPILOT HELPED", written("bash", {**count, "command": "echo 3"})),
        },
    ]


def resumed(cwd: Path) -> list[Entry]:
    """Continue, whose tools are Write, Edit, Bash and Read."""
    file = f"{cwd}/notes.txt"
    edits = [
        {"new_string": changed(at), "old_string": line(at), "file_path": file} for at in EDITED
    ]
    return tour(
        "continue",
        "Tour of continue",
        [
            step("I write (LABEL).", written("Write", {"content": MANY, "filepath": file})),
            step("I read (LABEL).", written("Read", {"filepath": file}, compact)),
            *(step("I edit (LABEL).", written("Edit", edit)) for edit in edits),
            step("I count (LABEL).", written("Bash", {"timeout": 50.0, "command": "wc -l *.txt"})),
            step("That was the tour (LABEL)."),
            step("I list (LABEL).", written("Bash", {"command": "ls"}, compact)),
            step("There is a file (LABEL)."),
        ],
    )


def framework(cwd: Path) -> list[Entry]:
    """A driver's program with one tool, `weather`: five calls, an answer, and one more turn."""
    calls = [
        written("weather", {"days": 3, "city": "Orléans", "note": "LABEL"}, compact),
        written("weather", {"note": "LABEL", "city": "Orléans"}),
        written("weather", {"city": "Orléans", "days": 5.0, "note": "LABEL"}, plain),
        written("weather", {"note": "LABEL " + MANY, "city": "Paris", "days": 1}),
        written("weather", {"city": "Nîmes", "note": "LABEL"}, compact),
    ]
    steps = [step(f"I look {n} times (LABEL).", call) for n, call in enumerate(calls)]
    last = [step("It will rain (LABEL)."), step("It will rain tomorrow, too (LABEL).")]
    return tour("framework", "How is the weather", [*steps, *last])


def long(cwd: Path) -> list[Entry]:
    """An answer during whose stream a worker can be killed, and another one."""
    answers = [step(f"It goes on.\n{MANY * 4} (LABEL)"), step("That was long (LABEL).")]
    return tour("long", "Write at length", answers)


TOURS = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "pi": pi,
    "qwen": qwen,
    "cline": cline,
    "mini": mini,
    "copilot": copilot,
    "continue": resumed,
    "framework": framework,
    "long": long,
}


def script(place: Callable[[str], Path]) -> list[Entry]:
    """All tours; `place` is the folder in which a client of a name runs."""
    return [entry for name, make in TOURS.items() for entry in make(place(name))]
