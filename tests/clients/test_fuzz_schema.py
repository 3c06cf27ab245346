"""The published OpenAPI description matches the server's responses."""

import json
from collections.abc import Iterator, Mapping

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.attack import send, wait_until_idle
from support.frontend import MODEL
from support.mesh import Mesh
from support.wait import PATIENCE_S

from kvmesh.frontend.http.openapi import ENDPOINTS, document

OPERATIONS = [
    pytest.param(endpoint.method.upper(), endpoint.path, mode)
    for endpoint in ENDPOINTS
    for mode in GenerationMode
    if endpoint.body is not None or mode is GenerationMode.POSITIVE
]
OVERLOADS = (429, 503, 504, 529)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# no worker meets these, and a frontend waits some seconds for one that does
NOWHERE = ("routing_constraints", "backend_instance_id", "dp_rank")
DESCRIPTION = schemathesis.openapi.from_dict(document())
bounded = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def _thresholds_that_no_load_reaches(mesh: Mesh) -> Iterator[None]:
    """Other tests use the mesh after these have set some thresholds."""
    yield
    highest = {"active_decode_blocks_threshold": 1.0, "active_prefill_tokens_threshold": 1 << 40}
    body = json.dumps({"model": MODEL, **highest}).encode()
    assert send(mesh, "/busy_threshold", body).status == 200


def test_the_description_equals_the_served_one(mesh: Mesh) -> None:
    reply = send(mesh, "/openapi.json", None)
    assert reply.json() == json.loads(json.dumps(document()))


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
@bounded
@given(data=st.data())
def test_responses_match_the_description(
    mesh: Mesh, method: str, path: str, mode: GenerationMode, data: DataObject
) -> None:
    operation = DESCRIPTION[path][method]
    case = data.draw(operation.as_strategy(generation_mode=mode))
    if data.draw(st.booleans()) and isinstance(case.body, dict):
        case.body = served(case.body)  # type: ignore[assignment]  # plain JSON
    response = case.call(base_url=mesh.url, timeout=PATIENCE_S)
    assert response.status_code < 500 or response.status_code in OVERLOADS, response.content
    case.validate_response(response, checks=CHECKS)


def served(body: Mapping[str, object]) -> dict[str, object]:
    """The body, changed to an existing model and a short output by any worker."""
    changed: dict[str, object] = {**body, "model": MODEL}
    changed.update(dict.fromkeys(LIMITS, 4))
    if isinstance(nvext := body.get("nvext"), dict):
        changed["nvext"] = {k: v for k, v in nvext.items() if k not in NOWHERE}
    return changed


async def test_nothing_is_left_over(mesh: Mesh) -> None:
    await wait_until_idle(mesh)
