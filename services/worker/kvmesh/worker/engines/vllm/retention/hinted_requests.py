"""Reports on the directives of requests to vLLM's own server, with hints or from a mesh."""

import logging
import re
from typing import Any

from kvmesh.bus.messages import Retain
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.adapters.request_origin import KEY, RequestOrigin
from kvmesh.worker.engines.vllm.retention.hints import (
    HintError,
    RequestHint,
    hinted_origin,
    outcome_report,
    parse_hint,
)

log = logging.getLogger(__name__)
MAX_REPORTS = 4096
_SUFFIX = re.compile("-[0-9a-f]{8}$")  # which vLLM appends to the ids of its API


class HintedRequests:
    """Hints of the requests in vLLM's scheduler, and the reports on the last MAX_REPORTS.

    A report has the outcome of each directive of the prompt as `retention`, that of the answer as
    `decode`, the number of blocks pinned as `pinned_blocks`, or the reason why there is none as
    `error`.
    """

    def __init__(self) -> None:
        self._hints: dict[str, tuple[RequestHint, RequestOrigin]] = {}
        self._open: dict[str, dict[str, Any]] = {}
        self._reports: LruCache[str, dict[str, Any]] = LruCache(MAX_REPORTS)
        self._malformed = 0

    def begin(self, request: Any) -> RequestOrigin | None:
        """The origin of a vLLM `Request` with a hint; None if it has none or a malformed one."""
        given = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
        if given is None or request.request_id in self._open:
            return None
        name = _SUFFIX.sub("", request.request_id)
        report = self._open[request.request_id] = {}
        self._reports.put(name, report)
        try:
            hint = parse_hint(given)
        except HintError as error:
            report["error"] = f"malformed: {error}"
            self._malformed += 1
            if self._malformed == 1:
                log.warning("a request has a malformed hint, as responses tell: %s", error)
            return None
        origin = _origin(hint, request)
        self._hints[request.request_id] = hint, origin
        return origin

    def origin(self, request: Any) -> RequestOrigin | None:
        """The origin of a vLLM `Request` that has not begun; None without a well-formed hint."""
        given = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
        try:
            return None if given is None else _origin(parse_hint(given), request)
        except HintError:
            return None

    def hint(self, request: str) -> RequestHint | None:
        """The hint of a request that has begun."""
        found = self._hints.get(request)
        return found[0] if found is not None else None

    def refuse(self, request: str, reason: str) -> None:
        """Report why a request's hint has no effect."""
        if request in self._open:
            self._open[request]["error"] = f"unsupported: {reason}"

    def report_prompt(self, request: str, outcomes: list[str]) -> None:
        """Report the outcomes of the prompt's directives, in order."""
        if request in self._hints:
            ranges = self._hints[request][1].retention
            told = [outcome_report(r, o) for r, o in zip(ranges, outcomes, strict=True)]
            self._open[request]["retention"] = told

    def report_pin(self, request: str, blocks: int) -> None:
        """Report how many blocks of the prompt are pinned."""
        self._open[request]["pinned_blocks"] = blocks

    def finish(self, request: str, decode: str | None) -> dict[str, Any] | None:
        """Forget a request; its report, None if it has no hint."""
        report = self._open.pop(request, None)
        _, origin = self._hints.pop(request, (None, None))
        if report is not None and origin is not None and origin.decode is not None and decode:
            answer: Retain = origin.decode
            report["decode"] = outcome_report(answer, decode)
        return report

    def record(self, name: str, outcomes: dict[str, Any]) -> None:
        """Record outcomes of a request from a mesh, whose worker queries them by its own id."""
        self._reports.put(name, {**(self._reports.peek(name) or {}), **outcomes})

    def report(self, name: str) -> dict[str, Any] | None:
        """The report on a recent request, by its id in vLLM's API."""
        for key in (name, f"{name}-0"):
            found = self._reports.peek(key)
            if found is not None:
                return found
        return None


def _origin(hint: RequestHint, request: Any) -> RequestOrigin:
    lora = request.lora_request
    return hinted_origin(
        hint,
        request.request_id,
        request.num_prompt_tokens,
        cache_salt=request.cache_salt or "",
        adapter=f"{lora.lora_name}:{lora.lora_path}" if lora is not None else "",
        session=request.session_id,
    )
