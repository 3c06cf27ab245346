"""Images and files before a model that reads text only: no session ends with one."""

import pytest

from kvmesh.frontend.conversation import (
    AttachedFile,
    Block,
    CacheControl,
    Image,
    Message,
    Text,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.preprocess.attachments import readable

IMAGE, PDF = Image("data:"), AttachedFile("PDF document", "a.pdf")
OMITTED = Text("[image omitted: this model cannot read it]")
ANSWER = Message("assistant", [Text("I see.")])
CALL = Message("assistant", [ToolCall("c", "read", "{}")])


def user(*blocks: Block) -> Message:
    return Message("user", list(blocks))


@pytest.mark.parametrize("sent", [IMAGE, PDF])
@pytest.mark.parametrize("before", [[], [user(Text("a")), ANSWER], [user(Text("a"))]])
def test_what_a_person_has_just_sent_is_refused(sent: Block, before: list[Message]) -> None:
    for newest in (user(sent), user(Text("look"), sent), user(sent, sent, Text("look"))):
        for behind in ([], [Message("system", [Text("reminder")])]):
            with pytest.raises(InvalidRequest, match="does not read") as error:
                readable([*before, newest, *behind], False)
            assert error.value.param == "messages"


@pytest.mark.parametrize(
    "after",
    [
        [user(Text("go on"))],
        [ANSWER, user(Text("go on"))],
        [ANSWER],
        [Message("system", [Text("x")]), user(Text("go on"))],
    ],
)
def test_a_client_that_repeats_it_in_its_history_goes_on(after: list[Message]) -> None:
    found = readable([user(Text("look"), IMAGE), *after], False)
    assert found == [user(Text("look"), OMITTED), *after]


def test_turns_that_a_client_joins_after_a_refusal_go_on() -> None:
    joined = user(Text("look"), IMAGE, Text("go on without it"))
    assert readable([joined], False)[0].blocks[1] == OMITTED


def test_images_of_tools_are_placeholders_wherever_they_are() -> None:
    inside = ToolResult("c", [Text("a.png:"), IMAGE, PDF], cache=CacheControl(9.0))
    (shown,) = readable([user(Text("a")), CALL, Message("tool", [inside])], False)[2].blocks
    assert isinstance(shown, ToolResult)
    assert shown.content[1:] == [
        OMITTED,
        Text("[PDF document a.pdf omitted: this model cannot read it]"),
    ]
    assert shown.cache == CacheControl(9.0)
    beside = [
        user(Text("a")),
        CALL,
        Message("tool", [ToolResult("c", [])]),
        user(Text("of c"), IMAGE),
    ]
    assert readable(beside, False)[-1] == user(Text("of c"), OMITTED)
    same = user(ToolResult("c", []), IMAGE)
    assert readable([user(Text("a")), CALL, same], False)[-1].blocks[1] == OMITTED


def test_a_mark_and_a_model_that_reads_images_keep_what_they_have() -> None:
    marked = Image("data:", CacheControl(5.0))
    assert readable([user(marked), ANSWER], False)[0].blocks[0].cache == CacheControl(5.0)  # type: ignore[union-attr]
    messages = [user(marked)]
    assert readable(messages, True) is messages
    assert readable([user(PDF), ANSWER], True)[0].blocks != [PDF]
