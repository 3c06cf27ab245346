"""Resolves the prompt of a cache request, preprocessed exactly like a generation request."""

from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import adapter_name
from kvmesh.frontend.apis.cache.body import PromptBody, to_request
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.http.request_id import stamp_of
from kvmesh.frontend.models import ModelRegistry, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces, scoped
from kvmesh.frontend.preprocess.conversation_key import sticky_key
from kvmesh.frontend.preprocess.preprocessor import Preprocessor, PromptTokens, hash_prompt
from kvmesh.frontend.preprocess.retention import explicit_retention
from kvmesh.frontend.sessions.last_prompts import LastPrompts

P = TypeVar("P", bound=PromptBody)


class ResolvedPrompt(Struct, frozen=True):
    """A preprocessed prompt, and the request that it belongs to."""

    request: GenerateRequest
    model: ServedModel
    adapter: str | None
    prompt: PromptTokens

    @property
    def tenant(self) -> str:
        return self.request.cache_salt

    @property
    def blocks(self) -> int:
        return self.prompt.count // self.model.card.block_size

    def require_full_block(self) -> None:
        """Raises InvalidRequest if the prompt is shorter than a block and so never cached."""
        if not self.blocks:
            size = self.model.card.block_size
            raise InvalidRequest(f"The prompt is shorter than a block of {size} tokens.")


class PromptResolver:
    """Turns the prompt of a cache request, or a session's last prompt, into tokens."""

    def __init__(
        self,
        registry: ModelRegistry,
        preprocessor: Preprocessor,
        sessions: LastPrompts,
        authenticator: Authenticator,
        tenants: TenantNamespaces,
    ) -> None:
        self._registry = registry
        self._authenticator = authenticator
        self._tenants = tenants
        self._preprocessor = preprocessor
        self._sessions = sessions

    async def resolve(self, call: EndpointCall[P]) -> ResolvedPrompt:
        """Preprocess the body's prompt; raises ApiError if it is invalid or its session unknown."""
        parsed = call.parsed
        request = await self._request(call)
        request.body_bytes += len(call.body)
        self._authenticator.bind(request, call.caller.account)
        model, adapter = self._registry.resolve_for(request, sticky_key)
        if parsed.session is not None:
            return await self._last(parsed.session, request, model)
        prepared = await self._preprocessor.prepare(request, model, adapter)
        if len(prepared.prompts) > 1:
            raise InvalidRequest("`prompt` must be a single prompt.", "prompt")
        return ResolvedPrompt(request, model, adapter, prepared.prompts[0])

    async def _request(self, call: EndpointCall[P]) -> GenerateRequest:
        parsed, body, headers, stamp = call.parsed, call.body, call.headers, stamp_of(call.http)
        if len(body) < LARGE:
            return to_request(parsed, body, headers, stamp)
        threads = self._preprocessor.threads
        return await threads.call(
            call.caller.owner, lambda: to_request(parsed, body, headers, stamp)
        )

    async def _last(
        self, session: str, request: GenerateRequest, model: ServedModel
    ) -> ResolvedPrompt:
        name = scoped(request.cache_salt, session)
        known = await self._sessions.find(model.card.name, name)
        if known is None:
            reason = f"No prompt of session `{session}` is stored."
            raise ApiError("not_found", reason, code="session_not_found", param="session")
        request.hints = replace(request.hints, session=name, conversation=known.conversation)
        adapter = _current(known.adapter, model)
        salt = self._tenants.salt(model.card.name, adapter or "", request.cache_salt)
        prompt = hash_prompt(known.tokens, model, salt, explicit_retention(request))
        return ResolvedPrompt(request, model, adapter, prompt)


def _current(adapter: str | None, model: ServedModel) -> str | None:
    """The adapter of the same name that serves requests now; the given one if there is none."""
    return None if adapter is None else model.adapters.get(adapter_name(adapter), adapter)
