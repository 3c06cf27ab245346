"""/v1/batches (OpenAI) and /v1/messages/batches (Anthropic)."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Raw, Struct

from kvmesh.bus.errors import Conflict
from kvmesh.frontend.apis.base import decode, decode_query, json_encode
from kvmesh.frontend.apis.openai import Metadata
from kvmesh.frontend.batches.batch import BatchCounts, Form, StoredBatch, cancelled
from kvmesh.frontend.batches.forms import message_batch, openai_batch
from kvmesh.frontend.batches.lines import MAX_CUSTOM_ID, MAX_LINES, METHOD
from kvmesh.frontend.batches.runner import BatchRunner
from kvmesh.frontend.batches.spool import Spool
from kvmesh.frontend.batches.store import BatchNotFound
from kvmesh.frontend.errors import InvalidRequest, Unavailable
from kvmesh.frontend.fair_threads import FairThreads
from kvmesh.frontend.http.batches.files import PURPOSE, ExpiresAfter
from kvmesh.frontend.http.batches.pages import PageQuery, page
from kvmesh.frontend.http.batches.uploads import send
from kvmesh.frontend.http.bodies import check_utf8, read_body
from kvmesh.frontend.http.endpoint import Answer, EndpointCall, EndpointFactory
from kvmesh.frontend.http.request_id import stamp_of
from kvmesh.settings.schema import FrontendSettings

OPENAI, MESSAGES = "/v1/batches", "/v1/messages/batches"
MESSAGE_ENDPOINT = "/v1/messages"
TENANT_HEADER = "x-tenant-id"
LISTED = 20  # batches of a page, if a client asks for no other number
CHANGES = 10  # attempts to change a batch that its frontend changes, too
CHANGE_S = 0.05
JSONL = "application/x-jsonl"
CustomId = Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID)]


class BatchBody(Struct):
    """POST /v1/batches. Unknown fields are ignored."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/responses", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class MessageRequest(Struct):
    custom_id: CustomId
    params: Raw


class MessageBatchBody(Struct):
    """POST /v1/messages/batches. Unknown fields are ignored."""

    requests: Annotated[list[MessageRequest], Meta(min_length=1)]


class BatchesQuery(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = LISTED
    after: str | None = None


_batch_bodies = msgspec.json.Decoder(BatchBody)
_message_bodies = msgspec.json.Decoder(MessageBatchBody)


class BatchEndpoints:
    """Makes the handlers of batches; `runner` executes those that are created here."""

    def __init__(
        self,
        endpoints: EndpointFactory,
        runner: BatchRunner,
        threads: FairThreads,
        settings: FrontendSettings,
    ) -> None:
        self._endpoints = endpoints
        self._store = runner.store
        self._runner = runner
        self._threads = threads
        self._settings = settings

    @property
    def routes(self) -> list[web.RouteDef]:
        handler = self._endpoints.without_body
        one, message = f"{OPENAI}/{{id}}", f"{MESSAGES}/{{id}}"
        create = self._endpoints.with_body(
            lambda body, *_: decode(_batch_bodies, body), self._create
        )
        return [
            web.post(OPENAI, create, name="batch-create"),
            web.get(OPENAI, handler(self._list), name="batches"),
            web.get(one, handler(self._get), name="batch"),
            web.post(f"{one}/cancel", handler(self._cancel), name="batch-cancel"),
            web.post(MESSAGES, handler(self._create_messages), name="message-batch-create"),
            web.get(MESSAGES, handler(self._list_messages), name="message-batches"),
            web.get(message, handler(self._get_messages), name="message-batch"),
            web.delete(message, handler(self._delete_messages), name="message-batch-delete"),
            web.post(
                f"{message}/cancel", handler(self._cancel_messages), name="message-batch-cancel"
            ),
            web.get(
                f"{message}/results", handler(self._message_results), name="message-batch-results"
            ),
        ]

    async def _create(self, call: EndpointCall[BatchBody]) -> Answer:
        body = call.parsed
        file = await self._store.file(body.input_file_id, call.caller.tenant)
        if file.purpose != PURPOSE:
            reason = f"The purpose of the file '{file.id}' is not `{PURPOSE}`."
            raise InvalidRequest(reason, "input_file_id")
        batch = self._new(call, "openai", f"batch_{_token(call)}", body.endpoint, file.id)
        if (age := body.output_expires_after) is not None:
            shorter = min(batch.output_ttl_s, age.seconds)
            batch = msgspec.structs.replace(batch, output_ttl_s=shorter)
        batch = msgspec.structs.replace(batch, metadata=body.metadata)
        self._runner.start(batch, await self._store.create(batch))
        return openai_batch(batch)

    def _new(
        self, call: EndpointCall[Any], form: Form, name: str, endpoint: str, file: str
    ) -> StoredBatch:
        account, headers = call.caller.account, call.headers
        return StoredBatch(
            id=name,
            form=form,
            endpoint=endpoint,
            tenant=call.caller.tenant,
            key=account.key.sha256 if account is not None else "",
            headers={n: headers[n] for n in (TENANT_HEADER,) if n in headers},
            input_file=file,
            created=self._store.now,
            owner=self._runner.instance,
            output_ttl_s=self._settings.files_ttl_s,
        )

    async def _create_messages(self, call: EndpointCall[None]) -> Answer:
        threads, owner = self._threads, call.caller.owner
        limit = self._settings.max_file_bytes
        body = await read_body(call.http, self._settings, threads, owner, limit)
        await check_utf8(body)
        name = f"msgbatch_{_token(call)}"
        batch = self._new(call, "anthropic", name, MESSAGE_ENDPOINT, f"{name}-requests")
        requests = Spool()
        try:
            total = await threads.call(owner, lambda: _spooled(body, requests))
            batch = msgspec.structs.replace(batch, counts=BatchCounts(total=total))
            self._runner.start(batch, await self._store.create(batch, requests))
        finally:
            requests.close()
        return self._shown(call, batch)

    async def _list(self, call: EndpointCall[None]) -> Answer:
        query = decode_query(call.http.query, BatchesQuery)
        found = await self._store.batches(call.caller.tenant, "openai")
        return page([openai_batch(batch) for batch in found], query.limit, query.after)

    async def _list_messages(self, call: EndpointCall[None]) -> Answer:
        query = decode_query(call.http.query, PageQuery)
        found = await self._store.batches(call.caller.tenant, "anthropic")
        shown = [self._shown(call, batch) for batch in found]
        return page(shown, query.limit or LISTED, query.after_id, query.before_id)

    async def _get(self, call: EndpointCall[None]) -> Answer:
        return openai_batch((await self._batch(call, "openai"))[0])

    async def _get_messages(self, call: EndpointCall[None]) -> Answer:
        return self._shown(call, (await self._batch(call, "anthropic"))[0])

    async def _cancel(self, call: EndpointCall[None]) -> Answer:
        return openai_batch(await self._stop(call, "openai"))

    async def _cancel_messages(self, call: EndpointCall[None]) -> Answer:
        return self._shown(call, await self._stop(call, "anthropic"))

    async def _stop(self, call: EndpointCall[None], form: Form) -> StoredBatch:
        """Have a batch cancelled; raises InvalidRequest if it has ended."""
        for _ in range(CHANGES):
            batch, revision = await self._batch(call, form)
            if batch.ended:
                raise InvalidRequest(f"The batch has ended: it is {batch.status}.")
            stopped = cancelled(batch, self._store.now)
            if stopped is batch:
                return batch
            try:
                await self._store.change(stopped, revision)
            except Conflict:
                await asyncio.sleep(CHANGE_S)
                continue
            self._runner.notice(batch.id)
            return stopped
        raise Unavailable("The batch changes all the time.")

    async def _delete_messages(self, call: EndpointCall[None]) -> Answer:
        batch, _ = await self._batch(call, "anthropic")
        self._require_end(batch)
        await self._store.delete(batch)
        return {"id": batch.id, "type": "message_batch_deleted"}

    async def _message_results(self, call: EndpointCall[None]) -> Answer:
        batch, _ = await self._batch(call, "anthropic")
        self._require_end(batch)
        spool = await self._store.content(batch.id, batch.tenant)
        return await send(call.http, spool, JSONL, self._settings)

    @staticmethod
    def _require_end(batch: StoredBatch) -> None:
        if not batch.ended:
            raise InvalidRequest("The batch has not ended; cancel it, or wait for its end.")

    async def _batch(self, call: EndpointCall[None], form: Form) -> tuple[StoredBatch, int]:
        batch, revision = await self._store.batch(call.path_id, call.caller.tenant)
        if batch.form != form:
            raise BatchNotFound("batch", call.path_id)
        return batch, revision

    @staticmethod
    def _shown(call: EndpointCall[None], batch: StoredBatch) -> dict[str, object]:
        http = call.http
        scheme = http.headers.get("x-forwarded-proto", http.scheme)
        scheme = scheme if scheme in ("http", "https") else http.scheme
        url = f"{scheme}://{http.host}{MESSAGES}/{batch.id}/results"
        return message_batch(batch, url)


def _token(call: EndpointCall[Any]) -> str:
    return stamp_of(call.http).token


def _spooled(body: bytes, requests: Spool) -> int:
    """Write the requests of a body as lines; their number. Raises InvalidRequest."""
    found = decode(_message_bodies, body).requests
    if len(found) > MAX_LINES:
        reason = f"`requests` has more than {MAX_LINES} entries."
        raise InvalidRequest(reason, "requests", "array_above_max_length")
    seen: set[str] = set()
    for number, each in enumerate(found):
        where = f"requests.{number}"
        if each.custom_id in seen:
            reason = f"`{where}.custom_id`: that of an earlier request."
            raise InvalidRequest(reason, f"{where}.custom_id")
        if not bytes(each.params).startswith(b"{"):
            raise InvalidRequest(f"`{where}.params`: must be an object.", f"{where}.params")
        seen.add(each.custom_id)
        line = {"custom_id": each.custom_id, "method": METHOD, "url": MESSAGE_ENDPOINT}
        text = json_encode({**line, "body": Raw(_one_line(bytes(each.params)))})
        requests.write(text + b"\n")
    return len(found)


def _one_line(value: bytes) -> bytes:
    """JSON without line ends, which are white space outside of strings, and never in them."""
    return value.replace(b"\r", b" ").replace(b"\n", b" ")
