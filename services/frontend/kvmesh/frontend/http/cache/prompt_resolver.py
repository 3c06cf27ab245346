"""Which prompt a caller means, made ready exactly as a request that has it."""

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import SessionPrompt
from kvmesh.frontend.apis.base import Headers
from kvmesh.frontend.apis.cache_body import PromptBody, to_request
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.http.bodies import LARGE
from kvmesh.frontend.models import ModelRegistry, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces, scoped
from kvmesh.frontend.preprocess.preprocessor import Preprocessor, PromptTokens, hash_prompt
from kvmesh.frontend.preprocess.retention import explicit_retention
from kvmesh.frontend.sessions.last_prompts import LastPrompts


class ResolvedPrompt(Struct, frozen=True):
    """A prompt and the request that would have it; `session` is its name on the wire."""

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

    def check(self) -> None:
        """Raise InvalidRequest if the prompt has no full block, so that nothing of it is cached."""
        if not self.blocks:
            size = self.model.card.block_size
            raise InvalidRequest(f"The prompt is shorter than a block, which has {size} tokens.")


class PromptResolver:
    """Finds them."""

    def __init__(
        self,
        registry: ModelRegistry,
        preparer: Preprocessor,
        sessions: LastPrompts,
        gate: Authenticator,
        tenants: TenantNamespaces,
    ) -> None:
        self._registry = registry
        self._gate = gate
        self._tenants = tenants
        self._preparer = preparer
        self._sessions = sessions

    async def find(
        self, parsed: PromptBody, body: bytes, headers: Headers, account: Account | None
    ) -> ResolvedPrompt:
        """Raises ApiError as a request with this prompt would, and for an unknown session."""
        if len(body) < LARGE:
            request = to_request(parsed, body, headers)
        else:
            owner = account.key.sha256 if account is not None else ""
            threads = self._preparer.threads
            request = await threads.call(owner, lambda: to_request(parsed, body, headers))
        request.size = len(body)
        self._gate.bind(request, account)
        model, adapter = self._registry.resolve(request.model)
        if parsed.session is not None:
            return await self._last(parsed.session, request, model)
        prepared = await self._preparer.prepare(request, model, adapter)
        if len(prepared.prompts) > 1:
            raise InvalidRequest("`prompt`: one prompt only.", "prompt")
        return ResolvedPrompt(request, model, adapter, prepared.prompts[0])

    async def _last(
        self, session: str, request: GenerateRequest, model: ServedModel
    ) -> ResolvedPrompt:
        name = scoped(request.cache_salt, session)
        known = await self._sessions.find(model.card.name, name)
        if known is None:
            reason = f"No prompt of the session `{session}` is known."
            raise ApiError("not_found", reason, code="session_not_found", param="session")
        request.hints = replace(request.hints, session=name)
        return ResolvedPrompt(request, model, known.adapter, self._prompt(known, request, model))

    def _prompt(
        self, known: SessionPrompt, request: GenerateRequest, model: ServedModel
    ) -> PromptTokens:
        seed = self._tenants.salt(model.card.name, known.adapter or "", request.cache_salt)
        return hash_prompt(known.tokens, model, seed, explicit_retention(request))
