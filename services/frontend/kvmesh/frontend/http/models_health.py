"""Endpoints of the models, the health and the metrics of the mesh."""

from typing import Protocol

import msgspec
from aiohttp import web

from kvmesh.frontend.apis.base import decode_query
from kvmesh.frontend.auth.authenticator import Authenticator
from kvmesh.frontend.errors import ModelNotFound
from kvmesh.frontend.http.batches.pages import PageQuery, page
from kvmesh.frontend.http.bodies import JSON
from kvmesh.frontend.http.middleware import caller_of
from kvmesh.frontend.models import ModelRegistry, ServedModel
from kvmesh.runtime.status_http import render_metrics, with_warnings
from kvmesh.runtime.warnings import Warnings


class FrontendReadiness(Protocol):
    """The frontend as /health sees it."""

    def missing(self) -> list[str]:
        """Reasons why the frontend cannot serve requests; empty if it is ready."""
        ...


class InformationEndpoints:
    """Handlers of /v1/models, /health, /live and /metrics."""

    def __init__(
        self,
        registry: ModelRegistry,
        readiness: FrontendReadiness,
        warnings: Warnings,
        authenticator: Authenticator,
    ) -> None:
        self._registry = registry
        self._readiness = readiness
        self._warnings = warnings
        self._authenticator = authenticator

    async def models(self, http: web.Request) -> web.Response:
        """The models and adapters that the caller may use: all, or a page of them.

        `models` is the catalog that Codex reads in place of `data`. It is empty: Codex refuses a
        catalog for one field that it misses, and an entry would replace the user's own.
        """
        account = caller_of(http).account
        found = [entry for model in self._registry.models for entry in _entries(model)]
        aliases = self._registry.served_aliases
        found = [entry for entry in found if entry["id"] not in aliases]
        found += [_entry(model, name) for name, model in aliases.items()]
        if account is not None:
            found = [entry for entry in found if account.allows_model(str(entry["id"]))]
        query = decode_query(http.query, PageQuery)
        limit = query.limit or len(found)
        shown = page(found, limit, query.after_id, query.before_id)
        known = {name: value for name, value in shown.items() if value is not None}
        return _json({**known, "models": []})

    async def model(self, http: web.Request) -> web.Response:
        name, account = http.match_info["id"], caller_of(http).account
        if account is not None and not account.allows_model(name):
            raise ModelNotFound(name)
        model, adapter = self._registry.resolve(name)
        alias = name in self._registry.served_aliases
        return _json(_entry(model, None if adapter is None and not alias else name))

    async def health(self, http: web.Request) -> web.Response:
        """Readiness, without a key; warnings name workers, so only admins see them."""
        missing = self._readiness.missing()
        status: dict[str, object] = {"status": "healthy"}
        if missing:
            status = {"status": "unhealthy", "missing": missing}
        if self._authenticator.is_admin(http.headers):
            status = with_warnings(status, self._warnings)
        return _json(status, 503 if missing else 200)

    async def live(self, _: web.Request) -> web.Response:
        return _json({"status": "live"})

    async def metrics(self, http: web.Request) -> web.Response:
        """Metrics of this process, with keys for admins only; `metrics_port` needs no key."""
        caller = caller_of(http)
        if caller.account is not None:
            caller.require_scope("admin")
        return render_metrics(http)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type=JSON)


def _entries(model: ServedModel) -> list[dict[str, object]]:
    return [_entry(model, adapter) for adapter in (None, *model.adapters)]


def _entry(model: ServedModel, adapter: str | None) -> dict[str, object]:
    """Fields of the OpenAI and Anthropic APIs, and the common names of the context length."""
    return {
        "id": adapter or model.card.name,
        "object": "model",
        "type": "model",
        "display_name": adapter or model.card.name,
        "created": model.created,
        "created_at": model.created_at,
        "owned_by": "kvmesh",
        "root": model.card.name,
        "context_length": model.card.context,
        "context_window": model.card.context,
        "max_model_len": model.card.context,
        "task": model.card.task,
    }
