"""Hints in requests to vLLM's own server, and the reports on them."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.bus.messages import Retain
from kvmesh.worker.adapters.request_origin import KEY, OriginError, request_origin
from kvmesh.worker.engines.vllm.retention.hinted_requests import MAX_REPORTS, HintedRequests
from kvmesh.worker.engines.vllm.retention.hints import HintError, hinted_origin, parse_hint


@dataclass
class Sampling:
    extra_args: dict[str, Any] | None = None


@dataclass
class VllmRequest:
    """The fields of vLLM's `Request` that are read."""

    request_id: str = "cmpl-1-0-0123abcd"
    kv_transfer_params: dict[str, Any] | None = None
    sampling_params: Sampling | None = field(default_factory=Sampling)
    num_tokens: int = 100
    num_prompt_tokens: int = 100
    cache_salt: str | None = None
    session_id: str | None = None
    lora_request: Any = None


def hinted(hint: object, **fields: Any) -> VllmRequest:
    text = hint if isinstance(hint, str) else json.dumps(hint)
    return VllmRequest(sampling_params=Sampling({KEY: text}), **fields)


def test_a_mark_retains_the_whole_prompt_and_ranges_override_it() -> None:
    ranges = [{"start": 0, "end": 64, "priority": 90}]
    hint = parse_hint(json.dumps({"cache_control": {"ttl": "1h"}, "retention": ranges}))
    origin = hinted_origin(hint, "r", 100, cache_salt="a", session="native")
    assert origin.retention == [
        Retain(0, None, 75, 3600.0, explicit=True),
        Retain(0, 64, 90, None, explicit=True),
    ]
    assert (origin.tenant, origin.session, origin.prompt_tokens) == ("a", "native", 100)
    assert hinted_origin(parse_hint('{"session": "own"}'), "r", 1, session="n").session == "own"


def test_tenants_and_adapters_have_namespaces_of_their_own() -> None:
    hint = parse_hint("{}")
    salts = {
        hinted_origin(hint, "r", 1, cache_salt=cache_salt, adapter=adapter).salt
        for cache_salt in ("", "a", "b")
        for adapter in ("", "x:/x")
    }
    assert len(salts) == 6


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "string"),
        ("{", "truncated"),
        ("[]", "object"),
        ('{"ttl": "5m"}', "unknown field"),
        ('{"cache_control": {"ttl": "0m"}}', "^`cache_control.ttl`: a duration is a whole number"),
        ('{"pin": {"id": "a", "ttl": "1 hour"}}', '^`pin.ttl`: .* such as "30s", "5m", "2h"'),
        ('{"cache_control": {"ttl": 5}}', "^`cache_control.ttl`: a duration is"),
        ('{"retention": [{"start": 8, "end": 8}]}', "range 0"),
        ('{"retention": [{"start": -1}]}', "retention"),
        ('{"pin": {"id": ""}}', "pin.id"),
        ("x" * 70_000, "longer"),
    ],
)
def test_a_malformed_hint_names_the_reason(value: object, reason: str) -> None:
    with pytest.raises(HintError, match=reason):
        parse_hint(value)


def test_a_report_is_kept_under_the_id_that_the_caller_knows() -> None:
    requests = HintedRequests()
    request = hinted({"retention": {"ranges": [{"start": 0}], "decode": {"priority": 60}}})
    origin = requests.begin(request)
    assert origin is not None
    assert requests.report("cmpl-1") == {}
    requests.report_prompt(request.request_id, ["clipped"])
    requests.report_pin(request.request_id, 3)
    report = requests.finish(request.request_id, "honoured")
    assert report is not None
    assert [told["outcome"] for told in report["retention"]] == ["clipped"]
    assert (report["pinned_blocks"], report["decode"]["outcome"]) == (3, "honoured")
    assert requests.report("cmpl-1") == requests.report("cmpl-1-0") == report
    assert requests.finish(request.request_id, None) is None


def test_a_malformed_hint_is_reported_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    requests = HintedRequests()
    for number in range(3):
        request = hinted("{", request_id=f"r{number}")
        assert requests.begin(request) is None
        assert str(requests.finish(request.request_id, None)).startswith("{'error': 'malformed: ")
    assert len(caplog.records) == 1


def test_requests_without_a_hint_leave_nothing() -> None:
    requests = HintedRequests()
    for request in (VllmRequest(), VllmRequest(sampling_params=None)):
        assert requests.begin(request) is None
        assert requests.finish(request.request_id, None) is None


def test_the_oldest_reports_are_forgotten() -> None:
    requests = HintedRequests()
    for number in range(MAX_REPORTS + 1):
        requests.begin(hinted({}, request_id=f"r{number}"))
        requests.finish(f"r{number}", None)
    assert requests.report("r0") is None
    assert requests.report("r1") == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"salt": -1},
        {"salt": 1 << 64},
        {"prompt_tokens": -1},
        {"prompt_tokens": 101},
        {"retention": [[-1]]},
        {"retention": [[8, 4]]},
        {"retention": [[0, None, 101]]},
        {"retention": [[0, None, 50, -1.0]]},
        {"decode": [0, None, -2]},
        {"request": 5},
        {"request": "r" * 300},
        {"retention": [[0]] * 5000},
    ],
)
def test_an_origin_that_anyone_may_have_sent_is_checked(fields: dict[str, Any]) -> None:
    params = {KEY: {"request": "r", "salt": 1, **fields}}
    with pytest.raises(OriginError):
        request_origin(VllmRequest(kv_transfer_params=params))
