"""Client of `/v1/chat/completions` that measures streamed requests."""

import time
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from kvmesh.workload.errors import WorkloadError


class EndpointError(WorkloadError):
    """The server is unreachable, lists no model or rejects the trial request."""


class Sample(Struct, kw_only=True):
    """Measurements of one request, in seconds.

    `late_s` is the delay of sending after the due time, `last_s` the time of the last content chunk
    since sending, `gap_s` the longest gap between two content chunks.
    """

    index: int
    late_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    last_s: float = 0.0
    gap_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    aborted: bool = False
    error: str | None = None

    @property
    def inter_token_s(self) -> float | None:
        """Mean time between output tokens after the first."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.ttft_s) / (self.output_tokens - 1)


class DeltaFrame(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChoiceFrame(Struct):
    delta: DeltaFrame = msgspec.field(default_factory=DeltaFrame)
    finish_reason: str | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class UsageFrame(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class ResponseFrame(Struct):
    """The used fields of a chunk or an error body."""

    choices: list[ChoiceFrame] = []
    usage: UsageFrame | None = None
    error: Any = None


_frames = msgspec.json.Decoder(ResponseFrame)


class ChatEndpoint:
    """One server and model; `headers` are sent with every request."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, model: str, headers: dict[str, str]
    ) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = headers
        self.model = model

    @classmethod
    async def open(
        cls, http: aiohttp.ClientSession, url: str, model: str | None, api_key: str | None
    ) -> "ChatEndpoint":
        """Connect; `model` defaults to the first that the server lists. Raises EndpointError."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        endpoint = cls(http, url, model or "", headers)
        if not model:
            endpoint.model = await endpoint._first_model()
        return endpoint

    async def _first_model(self) -> str:
        try:
            async with self._http.get(f"{self._url}/v1/models", headers=self._headers) as response:
                body = await response.read()
                if response.status != 200:
                    raise EndpointError(f"{self._url}/v1/models: {reason(response.status, body)}")
                models: list[str] = [card["id"] for card in msgspec.json.decode(body)["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EndpointError(f"cannot reach {self._url}: {describe(error)}") from error
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise EndpointError(f"{self._url}/v1/models returned no list of models") from error
        if not models:
            raise EndpointError(f"{self._url} serves no model yet")
        return models[0]

    async def prompt_tokens(self, text: str) -> int:
        """Prompt tokens that the server counts for one message. Raises EndpointError."""
        body = self._body(text, 1)
        try:
            async with self._http.post(
                f"{self._url}/v1/chat/completions", json=body, headers=self._headers
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EndpointError(f"cannot reach {self._url}: {describe(error)}") from error
        if response.status != 200:
            raise EndpointError(f"a trial request failed: {reason(response.status, content)}")
        usage = _frames.decode(content).usage
        return usage.prompt_tokens if usage else 0

    def _body(self, text: str, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max(1, tokens),
        }

    async def stream(
        self,
        sample: Sample,
        text: str,
        tokens: int,
        headers: dict[str, str],
        abort_after: int | None,
    ) -> None:
        """Send one request and fill `sample`; failures go to `sample.error`, none is raised.

        `abort_after` is the number of content chunks after which the client disconnects.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = msgspec.json.encode(self._body(text, tokens) | options)
        headers = {"Content-Type": "application/json", **self._headers, **headers}
        reader = StreamReading(sample, abort_after)
        try:
            async with self._http.post(
                f"{self._url}/v1/chat/completions", data=body, headers=headers
            ) as response:
                if response.status != 200:
                    sample.error = reason(response.status, await response.read())
                    return
                async for piece in response.content.iter_any():
                    if reader.feed(piece):
                        break
            reader.end()
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            sample.error = describe(error)
        finally:
            sample.total_s = time.perf_counter() - reader.started


class StreamReading:
    """Parses one event stream and records the times of its chunks in a sample."""

    def __init__(self, sample: Sample, abort_after: int | None) -> None:
        self.started = time.perf_counter()
        self._sample = sample
        self._abort_after = abort_after
        self._rest = b""
        self._pieces = 0
        self._finished = False

    def feed(self, data: bytes) -> bool:
        """Parse received bytes; True at the end of the stream or after `abort_after` chunks."""
        now = time.perf_counter() - self.started
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                return True
            self._read_frame(_frames.decode(content), now)
            if self._abort_after is not None and self._pieces >= self._abort_after:
                self._sample.aborted = True
                return True
        return False

    def _read_frame(self, frame: ResponseFrame, now: float) -> None:
        sample = self._sample
        if frame.error is not None:
            sample.error = message_of(frame.error)
        for choice in frame.choices:
            delta = choice.delta
            if delta.content or delta.reasoning_content or delta.tool_calls:
                self._piece(now)
            self._finished |= choice.finish_reason is not None
        if frame.usage is not None:
            details = frame.usage.prompt_tokens_details
            sample.prompt_tokens = frame.usage.prompt_tokens
            sample.output_tokens = frame.usage.completion_tokens
            sample.cached_tokens = (details.cached_tokens or 0) if details else 0

    def _piece(self, now: float) -> None:
        sample = self._sample
        self._pieces += 1
        if sample.ttft_s is None:
            sample.ttft_s = now
        else:
            sample.gap_s = max(sample.gap_s, now - sample.last_s)
        sample.last_s = now

    def end(self) -> None:
        sample = self._sample
        if sample.error is None and not sample.aborted and not self._finished:
            sample.error = "the stream ended without a finish reason"


def reason(status: int, body: bytes) -> str:
    """Status and message of an error response."""
    try:
        return f"{status} {message_of(_frames.decode(body).error)}"
    except msgspec.MsgspecError:
        return f"{status} {body[:120].decode(errors='replace')}"


def message_of(error: Any) -> str:
    """The text of an OpenAI-shaped error object."""
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or error)
    return str(error)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
