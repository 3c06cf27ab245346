"""Resolution of an alias by the registry of models."""

from typing import Any
from unittest.mock import Mock

from kvmesh.bus.messages import AliasTarget, ModelAlias, Sampling
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.models import ModelRegistry


async def test_a_response_that_goes_on_keeps_the_model_that_began_it() -> None:
    registry: Any = ModelRegistry(Mock(), Mock(), "frontend")
    registry._models = {name: Mock(workers={"worker"}) for name in ("a", "b")}
    registry.aliases["chat"] = ModelAlias(name="chat", targets=[AliasTarget("b")])
    fresh = GenerateRequest(id="1", model="chat", sampling=Sampling(max_tokens=1))
    begun = GenerateRequest(id="2", model="chat", sampling=Sampling(max_tokens=1), target="a")
    for request, target in ((fresh, "b"), (begun, "a")):
        model, _ = registry.resolve_for(request, lambda _: "session")
        assert model is registry._models[target]
        assert (request.model, request.target) == ("chat", target)
    del registry.aliases["chat"]
    assert registry.resolve_for(begun, lambda _: "session")[0] is registry._models["a"]
