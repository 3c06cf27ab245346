"""Bodies that maximise a server's cost within its bounds."""

from collections.abc import Iterator
from typing import NamedTuple

from kvmesh.frontend.apis.sealed_reasoning import seal

MODEL = "kvmesh-demo"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/v1/tokenize"
HEAD = f'{{"model":"{MODEL}","max_tokens":1,'.encode()
ASK = b'"messages":[{"role":"user","content":"x"}]'
VALUES = 1 << 19  # allowed in a body


class Body(NamedTuple):
    name: str
    path: str
    body: bytes


def bodies(size: int) -> Iterator[Body]:
    """Bodies of at most about `size` bytes each."""
    yield from _texts(size)
    yield from _conversations(size)
    yield from _tokens(size)
    yield from _values(size)
    yield from _strings_of_json(size)
    yield from _others(size)


def _prompt(text: bytes) -> bytes:
    return HEAD + b'"prompt":"' + text + b'"}'


def _user(text: bytes) -> bytes:
    return HEAD + ASK[:-3] + text + b'"}]}'


def _listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def _texts(size: int) -> Iterator[Body]:
    yield Body("words", TOKENIZE, _prompt(b"word, " * (size // 6)))
    yield Body("one word", TOKENIZE, _prompt(b"a" * size))
    yield Body(
        "words as long as allowed", TOKENIZE, _prompt((b"a" * 262_000 + b" ") * (size // 262_001))
    )
    yield Body("spaces", TOKENIZE, _prompt(b" " * size))
    yield Body(
        "spaces, as many as allowed", TOKENIZE, _prompt((b" " * 262_000 + b"a") * (size // 262_001))
    )
    yield Body("brackets", TOKENIZE, _prompt(b"<" * size))
    yield Body("no ASCII", TOKENIZE, _prompt("日本 ".encode() * (size // 7)))
    yield Body("beyond the BMP", TOKENIZE, _prompt("𐌰𐌱 ".encode() * (size // 9)))
    wide = "𐌰".encode() * 262_000 + b" "
    yield Body("beyond it, as long as allowed", TOKENIZE, _prompt(wide * (size // len(wide))))
    marks = ("e" + "\u0301\u0323" * 2000 + " ").encode()
    yield Body("combining marks", TOKENIZE, _prompt(marks * (size // len(marks))))
    yield Body("escapes", TOKENIZE, _prompt(b"\\u0061 " * (size // 7)))
    yield Body("as a chat", CHAT, _user(b"word, " * (size // 6)))
    yield Body("special tokens", CHAT, _user(b"<|im_end|>" * (size // 10)))
    yield Body("special tokens that fit", CHAT, _user(b"<|im_end|>" * (size // 12)))
    yield Body("a text that fits", CHAT, _user(b"word, " * (size // 18)))
    wide = "🦀".encode() + b" word" * (size // 5 - 40)
    yield Body(
        "wide words that fit", RESPONSES, b'{"model":"%s","input":"%s"}' % (MODEL.encode(), wide)
    )
    yield Body("a text for 128 answers", CHAT, _user(b"word, " * (size // 18))[:-1] + b',"n":128}')


def _conversations(size: int) -> Iterator[Body]:
    for role, count in (("user", 20_000), ("assistant", 20_000), ("system", 20_000)):
        each = b'{"role":"%s","content":"%s"}' % (role.encode(), b"x" * (size // count - 40))
        yield Body(
            f"20,000 messages of {role}", COUNT, HEAD + b'"messages":' + _listed(each, count) + b"}"
        )
    block = b'{"type":"text","text":"x"}'
    blocks = b'{"role":"user","content":' + _listed(block, 100_000) + b"}"
    yield Body("100,000 content blocks", MESSAGES, HEAD + b'"messages":[' + blocks + b"]}")
    marked = b'{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}'
    blocks = b'{"role":"user","content":' + _listed(marked, 60_000) + b"}"
    yield Body("60,000 marked blocks", MESSAGES, HEAD + b'"messages":[' + blocks + b"]}")
    use = b'{"type":"tool_use","id":"a","name":"f","input":{}}'
    result = b'{"type":"tool_result","tool_use_id":"a","content":"x"}'
    turn = b'{"role":"assistant","content":%s},{"role":"user","content":%s}'
    calls = turn % (_listed(use, 40_000), _listed(result, 40_000))
    half = turn % (_listed(use, 4_000), _listed(result, 4_000))
    yield Body("40,000 tool calls", MESSAGES, HEAD + b'"messages":[' + calls + b"]}")
    one = turn % (_listed(use, 1), _listed(result, 1))
    yield Body(
        "20,000 turns with a call", MESSAGES, HEAD + b'"messages":' + _listed(one, 10_000) + b"}"
    )
    edit = b'"context_management":{"edits":[{"type":"clear_thinking_20251015"},%s]},' % (
        b'{"type":"clear_tool_uses_20250919","trigger":{"type":"input_tokens","value":1}}'
    )
    cleared = HEAD + edit + b'"messages":'
    yield Body("8,000 tool calls to clear", MESSAGES, cleared + b"[" + half + b"," + half + b"]}")
    yield Body("10,000 turns to clear", COUNT, cleared + _listed(one, 5_000) + b"}")
    item = b'{"type":"message","role":"user","content":"x"}'
    yield Body("20,000 items", RESPONSES, HEAD + b'"input":' + _listed(item, 20_000) + b"}")
    hidden = (
        b'{"role":"assistant","content":[{"type":"thinking","thinking":"%s","signature":""},%s]}'
    )
    odd = b"a " * 20 + b"b" + b" a" * 31
    part = size // 3
    text = b'{"type":"text","text":"%s","cache_control":{"type":"ephemeral"}}' % (
        b"a " * (part // 2)
    )
    first = b'{"role":"user","content":[%s]}' % text
    second = hidden % ((b"a " * (part // 2) + odd), text)
    last = b'{"role":"user","content":"x"}'
    yield Body(
        "thinking that is not shown",
        MESSAGES,
        HEAD + b'"messages":[' + first + b"," + second + b"," + last + b"]}",
    )
    image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"A" * size + b'"}}'
    yield Body("an image", CHAT, HEAD + b'"messages":[{"role":"user","content":[' + image + b"]}]}")


def _tokens(size: int) -> Iterator[Body]:
    bias = b",".join(b'"%d":1' % token for token in range(size // 11))
    yield Body("logit_bias", CHAT, HEAD + ASK + b',"logit_bias":{' + bias + b"}}")
    ids = b"1234," * (size // 5)
    yield Body("token ids", "/v1/detokenize", HEAD + b'"tokens":[' + ids + b"1]}")
    allowed = _listed(b"1234", VALUES - 40)
    for name, path, field in (
        ("token ids, as many as allowed", "/v1/detokenize", b"tokens"),
        ("token ids as a prompt", COMPLETIONS, b"prompt"),
        ("token ids to prefetch", "/v1/prefetch", b"tokens"),
        ("token ids to pin", "/v1/cache/pins", b"tokens"),
    ):
        yield Body(name, path, HEAD + b'"%s":' % field + allowed + b"}")
    yield Body(
        "batch of prompts",
        COMPLETIONS,
        HEAD + b'"prompt":' + _listed(b"[1]", VALUES // 5 - 20) + b"}",
    )
    yield Body(
        "batch of texts",
        COMPLETIONS,
        HEAD + b'"prompt":' + _listed(b'"abcdefghij"', VALUES - 40) + b"}",
    )


def _values(size: int) -> Iterator[Body]:
    wide = b'"chat_template_kwargs":{"a":%s}'
    for name, item, cost in (
        ("objects", b"{}", 5),
        ("lists in lists", b"[[]]", 9),
        ("objects of a key", b'{"a":1}', 9),
        ("strings", b'"abcdefghijk"', 1),
        ("numbers", b"1.5e3", 1),
    ):
        yield Body(
            f"{name}, too many",
            CHAT,
            HEAD + ASK + b"," + wide % _listed(item, size // (len(item) + 1)) + b"}",
        )
        many = _listed(item, VALUES // cost - 40)
        yield Body(f"{name}, as many as allowed", CHAT, HEAD + ASK + b"," + wide % many + b"}")
        parameters = (
            b'"tools":[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]' % many
        )
        yield Body(f"{name}, in a tool", CHAT, HEAD + ASK + b"," + parameters + b"}")
        form = (
            b'"response_format":{"type":"json_schema","json_schema":{"schema":{"enum":%s}}}' % many
        )
        yield Body(f"{name}, in a schema", CHAT, HEAD + ASK + b"," + form + b"}")
    keys = b",".join(b'"%08d":1' % key for key in range(VALUES // 5 - 40))
    yield Body("keys", CHAT, HEAD + ASK + b"," + b'"chat_template_kwargs":{' + keys + b"}}")
    yield Body(
        "unknown fields",
        CHAT,
        HEAD + ASK + b',"nvext":{"extra_fields":["ignored"]},' + keys + b"}",
    )
    deep = b"[" * 900 + b"]" * 900
    nested = _listed(deep, VALUES // 4 // 900 - 1)
    yield Body("deep lists", CHAT, HEAD + ASK + b',"chat_template_kwargs":{"a":' + nested + b"}}")
    tool = b'{"type":"function","function":{"name":"f%d","strict":true,"parameters":{"a":{}}}}'
    tools = b",".join(tool % n for n in range(4096))
    yield Body("4,096 strict tools", CHAT, HEAD + ASK + b',"tools":[' + tools + b"]}")
    commas = b"," * (size // 2)
    yield Body("commas in a text", TOKENIZE, _prompt(commas))
    quoted = b",".join([b'",,,,"'] * ((1 << 19) - 64))
    yield Body("commas in texts", CHAT, HEAD + ASK + b',"stop":[' + quoted + b"]}")


def _strings_of_json(size: int) -> Iterator[Body]:
    """JSON encoded as text inside JSON."""
    call = (
        b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"%s"}}]}'
    )
    for name, text in (
        ("numbers", b'{\\"a\\":[' + b"1," * (size // 2) + b"1]}"),
        ("numbers, as many as allowed,", b'{\\"a\\":[' + b"1," * (VALUES - 40) + b"1]}"),
        ("lists, as many as allowed,", b'{\\"a\\":[' + b"[]," * (VALUES // 5 - 40) + b"1]}"),
        ("lists", b'{\\"a\\":[' + b"[]," * (size // 3) + b"1]}"),
        ("objects", b'{\\"a\\":[' + b"{}," * (size // 3) + b"1]}"),
        ("strings", b'{\\"a\\":[' + b'\\"\\",' * (size // 5) + b"1]}"),
        ("long text", b'{\\"a\\":\\"' + b"\\\\n" * (size // 3) + b'\\"}'),
    ):
        messages = b'"messages":[{"role":"user","content":"x"},' + call % text + b"]"
        yield Body(f"{name} in arguments", CHAT, HEAD + messages + b"}")
    item = b'{"type":"function_call","call_id":"a","name":"f","arguments":"%s"}'
    text = b'{\\"a\\":[' + b"1," * (size // 2) + b"1]}"
    yield Body("numbers in arguments", RESPONSES, HEAD + b'"input":[' + item % text + b"]}")


def _others(size: int) -> Iterator[Body]:
    stops = _listed(b'"' + b"a" * 63 + b'b"', 64)
    yield Body(
        "long stops",
        CHAT,
        HEAD[:-15]
        + b'"max_tokens":200,"ignore_eos":true,"n":128,'
        + ASK
        + b',"stop":'
        + stops
        + b"}",
    )
    yield Body(
        "a pattern",
        CHAT,
        HEAD
        + ASK
        + b',"response_format":{"type":"json_schema","json_schema":{"schema":{"pattern":"'
        + b"(a|b)*" * (size // 6)
        + b'"}}}}',
    )
    yield Body(
        "sessions",
        "/v1/sessions/release",
        b'{"sessions":' + _listed(b'"abcdef"', VALUES - 40) + b"}",
    )
    yield Body(
        "clear", "/v1/cache/clear", HEAD[:-15] + b'"tiers":' + _listed(b"1", VALUES - 40) + b"}"
    )
    yield Body(
        "constraints",
        CHAT,
        HEAD + ASK + b',"nvext":{"token_data":' + _listed(b"1", VALUES - 40) + b"}}",
    )
    bomb = seal("0" * (4 << 20)).encode()
    item = b'{"type":"reasoning","encrypted_content":"%s"}' % bomb
    bombs = _listed(item, size // len(item) - 1)
    yield Body("reasoning of zeros", RESPONSES, HEAD + b'"input":' + bombs + b"}")
    block = b'{"type":"thinking","thinking":"","signature":"%s"}' % bomb
    blocks = b'{"role":"assistant","content":' + _listed(block, size // len(block) - 1) + b"}"
    yield Body("signatures of zeros", MESSAGES, HEAD + b'"messages":[' + blocks + b"]}")
    zeros = b'{"type":"reasoning","encrypted_content":"kvm1:' + b"A" * size + b'"}'
    yield Body("sealed reasoning", RESPONSES, HEAD + b'"input":[' + zeros + b"]}")
