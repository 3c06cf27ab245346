"""vLLM's tool parsers behind JSON lines: run by the Python of an environment that has vLLM.

Reads {"parser", "tools", "output"} a line and writes {"text", "calls": [[name, arguments]]}, or
{"error"}.
"""

import json
import logging
import signal
import sys
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

LIMIT_S = 2  # of computing, for one output


class Vocabulary(dict[str, int]):
    """A vocabulary with every token."""

    def __missing__(self, token: str) -> int:
        self[token] = len(self) + 1
        return self[token]

    def __contains__(self, token: object) -> bool:
        return isinstance(token, str)

    def get(self, token: str, default: Any = None) -> int:
        return self[token]


class CharacterTokenizer:
    """One token for each character, and one for each marker that a parser asks for."""

    is_fast = True
    all_special_tokens: list[str] = []  # noqa: RUF012
    all_special_ids: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.vocab = Vocabulary()

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.vocab[token]

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.vocab[char] for char in text]

    def decode(self, tokens: list[int], **_: object) -> str:
        texts = {number: text for text, number in self.vocab.items()}
        return "".join(texts[token] for token in tokens)


def give_up(*_: object) -> None:
    raise TimeoutError("it runs on")


def main() -> None:
    signal.signal(signal.SIGPROF, give_up)
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            request = ChatCompletionRequest.model_validate(
                {
                    "model": "m",
                    "messages": [{"role": "user", "content": "x"}],
                    "tools": asked["tools"],
                    "tool_choice": "auto",
                }
            )
            made = ToolParserManager.get_tool_parser(asked["parser"])
            parser = made(CharacterTokenizer(), request.tools)
            found = parser.extract_tool_calls(asked["output"], request)
            calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
            answer: dict[str, Any] = {"text": found.content or "", "calls": calls}
        except Exception as error:  # an oracle's failure is an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


main()
