"""Uploads of files, as forms, and downloads."""

import asyncio
import re
from typing import NamedTuple

from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_protocol import RequestPayloadError

from kvmesh.frontend.batches.spool import Spool
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.bodies import invite, too_large, upload_timeout_s
from kvmesh.settings.schema import FrontendSettings

FORM = "multipart/form-data"
MAX_FIELD, MAX_FIELDS = 4 << 10, 16
MAX_NAME = 255
BLOCK = 256 << 10
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class UploadedForm(NamedTuple):
    """The fields of a form, and the bytes and the name of its file."""

    fields: dict[str, str]
    file: Spool
    name: str


async def receive(http: web.Request, settings: FrontendSettings) -> UploadedForm:
    """The form that a client sends; raises ApiError for one that is malformed, large or slow.

    The caller closes its file.
    """
    limit = settings.max_file_bytes
    if (http.content_length or 0) > limit + MAX_FIELDS * MAX_FIELD:
        raise too_large(limit)
    if http.content_type != FORM:
        raise InvalidRequest(f"The body must be a form, `Content-Type: {FORM}`.")
    await invite(http)
    form = UploadedForm({}, Spool(), "")
    try:
        async with asyncio.timeout(upload_timeout_s(settings, limit)):
            form = await _parts(http, form, limit)
        if not form.name:
            raise InvalidRequest("`file`: missing.", "file", "missing_required_parameter")
        if not form.file.size:
            raise InvalidRequest("`file`: the file is empty.", "file")
    except BaseException as error:
        form.file.close()
        if isinstance(error, TimeoutError):
            raise InvalidRequest("The body did not arrive in time.") from None
        if isinstance(error, ValueError | RequestPayloadError | BadHttpMessage):
            raise InvalidRequest("The body is not a form.") from error
        raise
    return form


async def _parts(http: web.Request, form: UploadedForm, limit: int) -> UploadedForm:
    reader = await http.multipart()
    while (part := await reader.next()) is not None:
        if not isinstance(part, BodyPartReader):
            raise InvalidRequest("The form has another one in it.")
        if len(form.fields) == MAX_FIELDS:
            raise InvalidRequest(f"The form has more than {MAX_FIELDS} fields.")
        field = _text(part.name)
        if field == "file" and not form.name:
            while block := await part.read_chunk(BLOCK):
                form.file.write(block)
                if form.file.size > limit:
                    raise too_large(limit)
            name = _CONTROL.sub("", _text(part.filename))[:MAX_NAME]
            form = form._replace(name=name or "file")
            continue
        value = b""
        while block := await part.read_chunk(MAX_FIELD):  # less than all that is to come
            value += block
            if len(value) >= MAX_FIELD:
                raise InvalidRequest(f"`{field[:64]}`: too long.", field[:64])
        form.fields[field] = value.decode()
    return form


def _text(name: str | None) -> str:
    """A name of a header, whose bytes need not be UTF-8."""
    return (name or "").encode(errors="replace").decode()


async def send(
    http: web.Request, spool: Spool, content_type: str, settings: FrontendSettings
) -> web.StreamResponse:
    """Send the bytes of a spool, which is closed then, to a client that keeps reading."""
    try:
        response = web.StreamResponse()
        response.content_type = content_type
        response.content_length = spool.size
        await response.prepare(http)
        if http.method != hdrs.METH_HEAD:
            for offset in range(0, spool.size, BLOCK):
                async with asyncio.timeout(settings.slow_reader_s):
                    await response.write(spool.read(offset, BLOCK))
        await response.write_eof()
        return response
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the client has not read for long") from None
    finally:
        spool.close()
