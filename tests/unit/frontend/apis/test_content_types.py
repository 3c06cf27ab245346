"""Content by its type: known types are shown, unknown ones break nothing."""

import base64
import json
from typing import Any

import pytest
from unit.frontend.apis.prompts import conversation, prompt_of, request_of

from kvmesh.frontend.conversation import Text, Thinking
from kvmesh.frontend.errors import InvalidRequest

CHATTY = ("chat", "messages", "responses")
TEXT = {"chat": "text", "messages": "text", "responses": "input_text"}
QUESTION = {"role": "user", "content": "What now?"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def shown(api: str, *parts: dict[str, Any]) -> str:
    """The parts of an earlier message, as the prompt shows them."""
    text = prompt_of(api, conversation(api, user(*parts), QUESTION))
    first = text.partition("<|im_start|>")[2].partition("<|im_end|>")[0]
    return first.partition("\n")[2]


ODD = [{}, {"text": 7}, {"source": 5, "title": [1]}, {"content": {"a": [None]}, "name": 3}]
ODD += [{"text": {"value": "x"}}, {"cache_control": "soon"}, {"input": "x", "tool_use_id": {}}]


@pytest.mark.parametrize("api", CHATTY)
@pytest.mark.parametrize("odd", ODD)
def test_content_of_an_unknown_type_breaks_no_body(api: str, odd: dict[str, Any]) -> None:
    part = {"type": "hologram", **odd}
    text = {"type": TEXT[api], "text": "Hello"}
    assert shown(api, text, part) == "Hello"
    ignored = request_of(api, conversation(api, user(text, part))).ignored
    where = "input" if api == "responses" else "messages"
    assert f"{where}[0].content[1]" in ignored


@pytest.mark.parametrize("api", CHATTY)
def test_the_text_of_an_unknown_type_is_shown(api: str) -> None:
    assert shown(api, {"type": "poem", "text": "Roses", "meter": 3}) == "Roses"


@pytest.mark.parametrize("api", CHATTY)
def test_the_texts_in_an_unknown_type_are_shown(api: str) -> None:
    texts = [{"type": TEXT[api], "text": "Roses"}, {"type": "x"}, {"type": "y", "text": "Tulips"}]
    assert shown(api, {"type": "poem", "content": texts}) == "Roses\nTulips"
    if api == "responses":
        item = {"type": "poem", "role": "user", "content": texts}
        assert "user\nRoses\nTulips" in prompt_of(api, conversation(api, item, QUESTION))


@pytest.mark.parametrize("api", CHATTY)
def test_texts_of_other_kinds_stay_apart_in_an_answer(api: str) -> None:
    poem = {"type": "poem", "text": "Roses"}
    known = {"type": "output_text" if api == "responses" else "text", "text": "Hello"}
    for parts in ([poem, known, known], [known, known, poem]):
        answer = {"role": "assistant", "content": parts}
        text = prompt_of(api, conversation(api, QUESTION, answer, QUESTION))
        words = "Roses\n\nHelloHello" if parts[0] is poem else "HelloHello\n\nRoses"
        assert f"assistant\n{words}<|im_end|>" in text


THOUGHTS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm", "signature": "s"},
    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]},
    {"type": "thinking", "text": "Hm"},
    {"type": "reasoning", "text": "Hm"},
    {"type": "reasoning", "reasoning": "Hm"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "reasoning_text", "text": "Hm"},
    {"type": "summary_text", "text": "Hm"},
]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("beside", [{}, {"reasoning_content": "Hm"}])
def test_parts_of_thinking_in_an_answer_are_thinking(
    api: str, thought: dict[str, Any], beside: dict[str, Any]
) -> None:
    text = {"type": "output_text" if api == "responses" else "text", "text": "Hello"}
    answer = {"role": "assistant", "content": [thought, text], **beside}
    request = request_of(api, conversation(api, QUESTION, answer, QUESTION))
    assert request.messages[1].blocks == [Thinking("Hm"), Text("Hello")]
    assert "[1].content[0]" not in " ".join(request.ignored)


@pytest.mark.parametrize("odd", [{}, {"thinking": 5}, {"data": "opaque"}, {"text": [None]}])
@pytest.mark.parametrize("kind", ["thinking", "reasoning", "redacted_thinking"])
def test_parts_of_thinking_without_a_text_are_listed(kind: str, odd: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": [{"type": kind, **odd}]}
    request = request_of("chat", conversation("chat", QUESTION, answer, QUESTION))
    assert (request.messages[1].blocks, request.ignored) == ([], ["messages[1].content[0]"])


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", ["hologram", "hologram_call", "hologram_call_output"])
def test_an_item_of_an_unknown_type_breaks_no_body(kind: str, odd: dict[str, Any]) -> None:
    item = {"type": kind, "id": 4, "call_id": ["x"], "role": {}, "output": 1, **odd}
    request = request_of("responses", conversation("responses", item, QUESTION))
    assert request.messages[-1].blocks[0].text == "What now?"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("api", "part", "field"),
    [
        ("chat", {"type": "text", "text": 7}, "messages[0].content[0].text"),
        ("messages", {"type": "text", "text": 7}, "messages.0.content.0.text"),
        ("messages", {"type": "tool_result", "content": 7}, "messages.0.content.0"),
        ("messages", {"text": "no type"}, "messages.0.content.0.type"),
        ("responses", {"type": "input_text", "text": []}, "input[0].content[0].text"),
        ("responses", {"text": "no type"}, "input[0].content[0].type"),
    ],
)
def test_a_known_type_with_a_wrong_field_is_refused_by_name(
    api: str, part: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        request_of(api, conversation(api, user(part)))
    assert str(error.value.param).startswith(field)


PLAIN = base64.b64encode(b"Plain words").decode()
ALPHA = {"type": "text", "text": "Alpha"}
DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "text", "media_type": "text/plain", "data": "Alpha"}, "Alpha"),
    ({"type": "content", "content": "Alpha"}, "Alpha"),
    ({"type": "content", "content": [ALPHA, {"type": "text", "text": "Beta"}]}, "Alpha\nBeta"),
    ({"type": "base64", "media_type": "text/plain", "data": PLAIN}, "Plain words"),
]


@pytest.mark.parametrize(("source", "text"), DOCUMENTS)
@pytest.mark.parametrize("inside", [True, False])
def test_documents_show_title_context_and_text(
    source: dict[str, Any], text: str, inside: bool
) -> None:
    document: dict[str, Any] = {
        "type": "document",
        "source": source,
        "title": "Report",
        "context": "From May",
    }
    document |= {"citations": {"enabled": True}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    found = shown("messages", result if inside else document)
    assert f"Report\nFrom May\n{text}" in found


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("content", ["Alpha", [ALPHA]])
def test_search_results_show_their_source(content: Any, inside: bool) -> None:
    hit: dict[str, Any] = {"type": "search_result", "source": "https://example.com/a", "title": "A"}
    hit |= {"content": content, "citations": {"enabled": True}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [hit]}
    assert "A\nhttps://example.com/a\nAlpha" in shown("messages", result if inside else hit)


PDF = base64.b64encode(b"%PDF-1.7").decode()
FILES: list[tuple[str, dict[str, Any], str]] = [
    (
        "messages",
        {"type": "document", "title": "a.pdf"}
        | {"source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
        "PDF document a.pdf",
    ),
    (
        "messages",
        {"type": "document", "source": {"type": "url", "url": "https://x.org/b.pdf"}},
        "PDF document https://x.org/b.pdf",
    ),
    ("chat", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio file"),
    (
        "chat",
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,"},
        },
        "PDF document a.pdf",
    ),
    ("chat", {"type": "video_url", "video_url": {"url": "https://x.org"}}, "video"),
    ("chat", {"type": "audio_url", "audio_url": {"url": "https://x.org"}}, "audio file"),
    ("chat", {"type": "image", "image": "https://x.org"}, "image"),
    ("messages", {"type": "video", "source": {"type": "url", "url": "https://x.org"}}, "video"),
    ("responses", {"type": "input_video", "video_url": "https://x.org"}, "video"),
    ("responses", {"type": "input_file", "file_id": "file-1"}, "file file-1"),
    ("responses", {"type": "input_image", "file_id": "file-1", "detail": "low"}, "image"),
]


@pytest.mark.parametrize(("api", "part", "kind"), FILES)
def test_files_that_no_model_reads_are_placeholders_in_history(
    api: str, part: dict[str, Any], kind: str
) -> None:
    assert shown(api, part) == f"[{kind} omitted: this model cannot read it]"
    with pytest.raises(InvalidRequest, match="does not read") as error:
        prompt_of(api, conversation(api, user(part)))
    assert error.value.param == ("input" if api == "responses" else "messages")


def test_content_is_nested_to_a_bounded_depth() -> None:
    block: dict[str, Any] = {"type": "text", "text": "deep"}
    for _ in range(4):
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        request_of("messages", conversation("messages", user(block)))


def test_text_files_are_text() -> None:
    data = f"data:text/markdown;base64,{PLAIN}"
    file = {"filename": "a.md", "file_data": data}
    assert shown("chat", {"type": "file", "file": file}) == "a.md\nPlain words"
    assert shown("responses", {"type": "input_file", **file}) == "a.md\nPlain words"


# --- results of tools --------------------------------------------------------------------------


def with_results(api: str, ids: str) -> dict[str, Any]:
    """A conversation with the calls A to C, whose results arrive in another order."""
    names = {"A": "f", "B": "g", "C": "h"}
    if api == "chat":
        calls = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}}
            for i, n in names.items()
        ]
        results = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in ids]
        return conversation(api, QUESTION, {"role": "assistant", "tool_calls": calls}, *results)
    if api == "messages":
        uses = [{"type": "tool_use", "id": i, "name": n, "input": {}} for i, n in names.items()]
        came = [{"type": "tool_result", "tool_use_id": i, "content": f"of {i}"} for i in ids]
        return conversation(api, QUESTION, {"role": "assistant", "content": uses}, user(*came))
    items = [
        {"type": "function_call", "call_id": i, "name": n, "arguments": "{}"}
        for i, n in names.items()
    ]
    outputs = [{"type": "function_call_output", "call_id": i, "output": f"of {i}"} for i in ids]
    return conversation(api, QUESTION, *items, *outputs)


@pytest.mark.parametrize("api", CHATTY)
def test_results_are_in_the_order_of_their_calls(api: str) -> None:
    prompts = {prompt_of(api, with_results(api, ids)) for ids in ("ABC", "CBA", "BCA", "CAB")}
    (prompt,) = prompts
    assert prompt.index("of A") < prompt.index("of B") < prompt.index("of C")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "Error: 42"),
        ("", "Error:"),
        ("Error: no such file", "Error: no such file"),
        (
            "<tool_use_error>Cancelled</tool_use_error>",
            "<tool_use_error>Cancelled</tool_use_error>",
        ),
        ("ENOENT: error, open 'a'", "ENOENT: error, open 'a'"),
    ],
)
def test_a_failed_call_says_so_once(text: str, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": text}
    assert f"<tool_response>\n{expected}\n</tool_response>" in shown(
        "messages", result | {"is_error": True}
    )
    assert f"<tool_response>\n{text}\n</tool_response>" in shown(
        "messages", result | {"is_error": False}
    )


HOSTED: list[tuple[str, dict[str, Any], str]] = [
    ("mcp", {"content": [{"type": "text", "text": "Alpha"}], "is_error": False}, "Alpha"),
    ("mcp", {"content": "Alpha", "is_error": True}, "Error: Alpha"),
    (
        "web_search",
        {
            "content": [
                {"type": "web_search_result", "title": "A", "url": "https://x.org"}
                | {"encrypted_content": "zzz", "page_age": "May"}
            ]
        },
        "A\nhttps://x.org\nMay",
    ),
    (
        "bash_code_execution",
        {"content": {"type": "bash_code_execution_result", "stdout": "ok", "return_code": 0}},
        '{"stdout":"ok","return_code":0}',
    ),
    (
        "web_fetch",
        {"content": {"type": "web_fetch_tool_result_error", "error_code": "unavailable"}},
        '{"error_code":"unavailable"}',
    ),
    ("next_year", {"content": {"type": "x", "answer": ["Alpha"]}}, '{"answer":["Alpha"]}'),
]


@pytest.mark.parametrize(("tool", "fields", "expected"), HOSTED)
def test_what_another_server_s_tools_returned_is_shown(
    tool: str, fields: dict[str, Any], expected: str
) -> None:
    use = {"type": f"{'mcp' if tool == 'mcp' else 'server'}_tool_use", "id": "s", "name": tool}
    result = {"type": f"{tool}_tool_result", "tool_use_id": "s", **fields}
    answer = {"role": "assistant", "content": [ALPHA, use | {"input": {"q": 1}}, result, ALPHA]}
    text = prompt_of("messages", conversation("messages", QUESTION, answer, QUESTION))
    call, _, rest = text.partition("<tool_response>\n")
    assert f'{{"name": "{tool}", "arguments": {{"q": 1}}}}' in call
    assert rest.startswith(f"{expected}\n</tool_response>")
    assert "Alpha" in rest.partition("<|im_start|>assistant")[2]


ITEMS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"type": "mcp_call", "id": "m", "name": "roll", "arguments": '{"n":2}', "output": "5"}
        | {"server_label": "dice"},
        ['"name": "roll", "arguments": {"n": 2}', "<tool_response>\n5\n"],
    ),
    (
        {"type": "mcp_call", "id": "m", "name": "roll", "arguments": "{}", "error": "down"},
        ["<tool_response>\nError: down\n"],
    ),
    (
        {"type": "file_search_call", "id": "f", "queries": ["q"], "status": "completed"}
        | {"results": [{"text": "Found it", "filename": "a", "score": 1}]},
        ['"name": "file_search", "arguments": {"queries": ["q"]}', "Found it"],
    ),
    (
        {"type": "code_interpreter_call", "id": "c", "code": "1+1", "container_id": "x"}
        | {"outputs": [{"type": "logs", "logs": "2"}]},
        ['"code": "1+1"', '{"logs":"2"}'],
    ),
]


@pytest.mark.parametrize(("item", "texts"), ITEMS)
def test_items_of_hosted_tools_are_calls_and_results(
    item: dict[str, Any], texts: list[str]
) -> None:
    text = prompt_of("responses", conversation("responses", QUESTION, item, QUESTION))
    assert [part for part in texts if part not in text] == []


def test_items_of_clients_own_tools_are_paired() -> None:
    call = {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}}
    came = [{"stdout": "a.py", "outcome": {"type": "exit", "exit_code": 0}}]
    output = {"type": "shell_call_output", "call_id": "s", "output": came}
    text = prompt_of("responses", conversation("responses", QUESTION, call, output))
    assert '{"name": "shell", "arguments": {"commands": ["ls"]}}' in text
    assert '<tool_response>\n{"stdout":"a.py","outcome":{"exit_code":0}}' in text


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
            '"name": "web_search", "arguments": {"type": "search", "query": "q"}',
        ),
        (
            {"type": "code_interpreter_call", "code": "1+1", "outputs": None},
            '"name": "code_interpreter", "arguments": {"code": "1+1"}',
        ),
        (
            {"type": "mcp_call", "name": "roll", "arguments": '{"n":2}', "output": None},
            '"name": "roll", "arguments": {"n": 2}',
        ),
        ({"type": "next_year_call", "asked": "q"}, '"arguments": {"asked": "q"}'),
    ],
)
def test_a_hosted_call_without_a_result_says_so(item: dict[str, Any], shown: str) -> None:
    """Vendors leave most results out of their items."""
    body = conversation("responses", QUESTION, {"id": "w", **item}, QUESTION)
    text = prompt_of("responses", body)
    assert f"{shown}}}\n</tool_call>" in text
    assert "<tool_response>\n[the result of this call was not sent]\n" in text
    assert request_of("responses", body).ignored == []


@pytest.mark.parametrize("kind", ["web_search_call", "image_generation_call", "next_year_call"])
def test_a_hosted_call_that_says_nothing_is_listed(kind: str) -> None:
    item = {"type": kind, "id": "w", "status": "failed", "result": None}
    request = request_of("responses", conversation("responses", QUESTION, item))
    assert request.ignored == ["input[1]"]
    assert len(request.messages) == 1


def test_a_generated_image_is_a_placeholder() -> None:
    made = {"type": "image_generation_call", "id": "i", "result": "iVBORw0K" * 99}
    item = {**made, "revised_prompt": "a cat"}
    text = prompt_of("responses", conversation("responses", QUESTION, item, QUESTION))
    assert '"arguments": {"revised_prompt": "a cat"}' in text
    assert "<tool_response>\n[image omitted: this model cannot read it]" in text


OUTPUTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "a.py"},  # has no other id
        "a.py",
    ),
    (
        {"type": "tool_search_call", "call_id": "c", "arguments": {"q": "x"}},
        {"type": "tool_search_output", "call_id": "c", "tools": [{"name": "found"}]},
        '{"tools":[{"name":"found"}]}',
    ),
]


@pytest.mark.parametrize(("call", "output", "shown"), OUTPUTS)
def test_outputs_of_every_form_are_paired(
    call: dict[str, Any], output: dict[str, Any], shown: str
) -> None:
    text = prompt_of("responses", conversation("responses", QUESTION, call, output))
    assert f"<tool_response>\n{shown}\n</tool_response>" in text


def test_a_screenshot_is_a_placeholder() -> None:
    call = {"type": "computer_call", "call_id": "s", "action": {"type": "screenshot"}}
    output = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="}
    came = {"type": "computer_call_output", "call_id": "s", "output": output}
    text = prompt_of("responses", conversation("responses", QUESTION, call, came))
    assert "<tool_response>\n[screenshot omitted: this model cannot read it]" in text


# --- texts beside the content ------------------------------------------------------------------


@pytest.mark.parametrize("api", CHATTY)
def test_a_placeholder_stays_apart_from_the_text_of_an_answer(api: str) -> None:
    text = {"type": "output_text" if api == "responses" else "text", "text": "Look:"}
    answer = {"role": "assistant", "content": [text, {"type": "output_image"}, text]}
    shown = prompt_of(api, conversation(api, QUESTION, answer, QUESTION))
    placeholder = "[image omitted: this model cannot read it]"
    assert f"assistant\nLook:\n\n{placeholder}\n\nLook:<|im_end|>" in shown


def test_thinking_and_calls_are_no_gap_between_texts_of_an_answer() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
    answer = {"role": "assistant", "content": [thought, ALPHA, ALPHA, use]}
    blocks = request_of("messages", conversation("messages", QUESTION, answer)).messages[-1].blocks
    assert [type(block).__name__ for block in blocks] == ["Thinking", "Text", "Text", "ToolCall"]


def test_a_refusal_stays_apart_from_the_text_before_it() -> None:
    for fields in (
        {"content": "Well.", "refusal": "I cannot."},
        {
            "content": [
                {"type": "text", "text": "Well."},
                {"type": "refusal", "refusal": "I cannot."},
            ]
        },
    ):
        body = conversation("chat", QUESTION, {"role": "assistant", **fields}, QUESTION)
        assert "assistant\nWell.\n\nI cannot.<|im_end|>" in prompt_of("chat", body)


def test_what_a_message_of_another_role_cannot_hold_is_listed() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    thought = {"type": "thinking", "thinking": "Hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [ALPHA, use, thought]}
    body = conversation("messages", user(ALPHA, use, thought, result))
    listed = request_of("messages", body).ignored
    inner = "messages[0].content[3].content"
    assert [*listed] == [
        "messages[0].content[1]",
        "messages[0].content[2]",
        f"{inner}[1]",
        f"{inner}[2]",
    ]


def test_fields_of_other_roles_are_listed() -> None:
    called = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
    asked = {"role": "user", "content": "Hi", "tool_calls": called, "reasoning_content": "Hm"}
    answer = {"role": "assistant", "content": "Yes", "tool_call_id": "c"}
    paths = ["messages[0].tool_calls", "messages[0].reasoning_content", "messages[1].tool_call_id"]
    assert request_of("chat", conversation("chat", asked, answer, QUESTION)).ignored == paths


@pytest.mark.parametrize(
    ("api", "item", "path"),
    [
        (
            "messages",
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "", "signature": "Eq"}, ALPHA],
            },
            "messages[1].content[0]",
        ),
        ("responses", {"type": "reasoning", "summary": [], "encrypted_content": "gA"}, "input[1]"),
    ],
)
def test_thinking_that_cannot_be_read_is_listed(api: str, item: Any, path: str) -> None:
    assert request_of(api, conversation(api, QUESTION, item, QUESTION)).ignored == [path]


def test_an_image_inside_a_document_is_listed() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    document = {"type": "document", "source": {"type": "content", "content": [ALPHA, image]}}
    body = conversation("messages", user(document))
    assert request_of("messages", body).ignored == ["messages[0].content[0].source.content"]
    assert "user\nAlpha<|im_end|>" in prompt_of("messages", body)


EMPTY: list[dict[str, Any]] = [
    {"type": "search_result", "source": None, "title": None, "content": "Alpha"},
    {"type": "document", "title": None, "source": {"type": "text", "data": "Alpha"}}
    | {"context": None, "citations": None, "cache_control": None},
    {"type": "document", "source": {"type": "text", "media_type": None, "data": "Alpha"}}
    | {"source": {"type": "text", "data": "Alpha", "url": None, "file_id": None}},
]


@pytest.mark.parametrize("part", EMPTY)
def test_optional_fields_may_be_null(part: dict[str, Any]) -> None:
    assert shown("messages", part) == "Alpha"


def test_refusals_names_and_sources_reach_the_prompt() -> None:
    named = {"role": "user", "name": "Ada", "content": "Hi"}
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    cited = {"type": "url_citation", "url_citation": {"url": "https://x.org", "title": "X"}}
    sourced = {"role": "assistant", "content": "Yes.", "annotations": [cited, cited], "name": "b"}
    body = conversation("chat", named, refused, QUESTION, sourced, QUESTION)
    text = prompt_of("chat", body)
    assert "user\nAda: Hi<|im_end|>" in text
    assert "I cannot.<|im_end|>" in text
    assert "Yes. [https://x.org]<|im_end|>" in text
    assert request_of("chat", body).ignored == ["messages[3].name"]


def test_citations_of_messages_and_responses_name_their_sources() -> None:
    cited = {"type": "char_location", "cited_text": "so", "document_title": "Report"}
    text = {"type": "text", "text": "Yes.", "citations": [cited]}
    answer = {"role": "assistant", "content": [text]}
    assert "Yes. [Report]" in prompt_of("messages", conversation("messages", answer, QUESTION))
    noted = {"type": "output_text", "text": "Yes.", "annotations": [{"url": "https://x.org"}]}
    answer = {"role": "assistant", "content": [noted]}
    body = conversation("responses", answer, QUESTION)
    assert "Yes. [https://x.org]" in prompt_of("responses", body)


def test_the_deprecated_form_of_calls_in_history_is_read() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    result = {"role": "function", "name": "f", "content": "42"}
    text = prompt_of("chat", conversation("chat", QUESTION, call, result))
    assert '{"name": "f", "arguments": {}}' in text
    assert "<tool_response>\n42" in text


# --- halves of characters ----------------------------------------------------------------------


@pytest.mark.parametrize("api", CHATTY)
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ud83d\ude00", "😀"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\uD83Dx\uDE00", "\ufffdx\ufffd"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
        (r"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (r"\\\ud83d\\\ude00", "\\\ufffd\\\ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
    ],
)
def test_halves_of_characters_are_replaced_anywhere(api: str, written: str, read: str) -> None:
    body = json.dumps({"model": "m", **conversation(api, {"role": "user", "content": "HALF"})})
    extra = '"nvext": {"extra_fields": ["ignored"]}, "unknown": "HALF", '
    sent = body.replace("{", "{" + extra, 1).replace("HALF", written).encode()
    assert f"user\n{read}<|im_end|>" in prompt_of(api, sent)
    assert request_of(api, sent).ignored == ["unknown"]


def test_malformed_json_is_still_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        request_of("chat", rb'{"model": "\ud83d", "messages": [')
