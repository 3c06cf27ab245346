"""/v1/files (OpenAI): the files with the requests of batches, and those with their results."""

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from kvmesh.frontend.apis.base import decode_query
from kvmesh.frontend.batches.forms import StoredFile, file_object
from kvmesh.frontend.batches.store import BatchStore
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.batches.pages import page
from kvmesh.frontend.http.batches.uploads import receive, send
from kvmesh.frontend.http.endpoint import Answer, EndpointCall, EndpointFactory
from kvmesh.frontend.http.middleware import UPLOAD
from kvmesh.frontend.http.request_id import stamp_of
from kvmesh.settings.schema import FrontendSettings

PATH = "/v1/files"
PURPOSE = "batch"
MAX_FILES = 10_000  # of a page


class ExpiresAfter(Struct):
    """The age, in seconds from its creation, at which a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class FilesQuery(Struct):
    limit: Annotated[int, Meta(ge=1, le=MAX_FILES)] = MAX_FILES
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    purpose: str | None = None


class FileEndpoints:
    """Makes the handlers of files."""

    def __init__(
        self, endpoints: EndpointFactory, store: BatchStore, settings: FrontendSettings
    ) -> None:
        self._endpoints = endpoints
        self._store = store
        self._settings = settings

    @property
    def routes(self) -> list[web.RouteDef]:
        handler = self._endpoints.without_body
        one = f"{PATH}/{{id}}"
        return [
            web.post(PATH, handler(self._upload), name=UPLOAD),
            web.get(PATH, handler(self._list), name="files"),
            web.get(one, handler(self._get), name="file"),
            web.delete(one, handler(self._delete), name="file-delete"),
            web.get(f"{one}/content", handler(self._content), name="file-content"),
        ]

    async def _upload(self, call: EndpointCall[None]) -> Answer:
        form = await receive(call.http, self._settings)
        try:
            if form.fields.get("purpose") != PURPOSE:
                raise InvalidRequest(f"`purpose` must be `{PURPOSE}`.", "purpose")
            now, longest = self._store.now, self._settings.files_ttl_s
            file = StoredFile(
                id=f"file-{stamp_of(call.http).token}",
                tenant=call.caller.tenant,
                name=form.name,
                purpose=PURPOSE,
                bytes=form.file.size,
                created=now,
                expires=now + min(longest, _age(form.fields) or longest),
            )
            await self._store.add_file(file, form.file)
        finally:
            form.file.close()
        return file_object(file)

    async def _list(self, call: EndpointCall[None]) -> Answer:
        query = decode_query(call.http.query, FilesQuery)
        files = await self._store.files(call.caller.tenant)
        found = [file for file in files if query.purpose in (None, file.purpose)]
        if query.order == "desc":
            found.reverse()
        return page([file_object(file) for file in found], query.limit, query.after)

    async def _file(self, call: EndpointCall[None]) -> StoredFile:
        return await self._store.file(call.path_id, call.caller.tenant)

    async def _get(self, call: EndpointCall[None]) -> Answer:
        return file_object(await self._file(call))

    async def _delete(self, call: EndpointCall[None]) -> Answer:
        file = await self._file(call)
        await self._store.delete_file(file)
        return {"id": file.id, "object": "file", "deleted": True}

    async def _content(self, call: EndpointCall[None]) -> Answer:
        file = await self._file(call)
        spool = await self._store.content(file.id, file.tenant)
        return await send(call.http, spool, "application/octet-stream", self._settings)


def _age(fields: dict[str, str]) -> int | None:
    """The age at which a form wants its file to expire; the SDKs write the nested names so."""
    given = {name: fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if given == {"anchor": None, "seconds": None}:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False).seconds
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`expires_after`: {error}", "expires_after") from error
