"""`/v1/files` and `/v1/batches`, as OpenAI's clients use them."""

import msgspec
from aiohttp import web

from ..answering import Answering, json_answer
from ..gateway import Gateway
from ..keys import owner_of
from ..middleware import api_key
from ..openai.json_errors import read_json
from ..paging import MOST_BATCHES, MOST_FILES, parse_page
from .database import Tables
from .objects import BatchList, BatchRequest, FileDeleted, FileList
from .upload import Upload

_FILES_PAGE, _BATCHES_PAGE = 10_000, 20


def batch_routes(gateway: Gateway) -> list[web.RouteDef]:
    """Bound to one gateway."""
    handlers = BatchHandlers(gateway)
    return [
        web.post("/v1/files", handlers.upload),
        web.get("/v1/files", handlers.files),
        web.get("/v1/files/{file_id}", handlers.file),
        web.delete("/v1/files/{file_id}", handlers.delete_file),
        web.get("/v1/files/{file_id}/content", handlers.content),
        web.post("/v1/batches", handlers.create),
        web.get("/v1/batches", handlers.batches),
        web.get("/v1/batches/{batch_id}", handlers.batch),
        web.post("/v1/batches/{batch_id}/cancel", handlers.cancel),
    ]


class BatchHandlers:
    """Everybody sees what came with the same API key, and nothing else."""

    def __init__(self, gateway: Gateway):
        self._batches = gateway.batches
        self._answering = Answering(gateway)
        self._decoder = msgspec.json.Decoder(BatchRequest)

    async def upload(self, request: web.Request) -> web.StreamResponse:
        batches = self._batches
        return json_answer(await Upload(batches.database, _owner(request), batches.now()).receive(request))

    async def files(self, request: web.Request) -> web.StreamResponse:
        page = parse_page(request.query, _FILES_PAGE, MOST_FILES)
        owner, purpose = _owner(request), request.query.get("purpose")
        found, has_more = await self._batches.call(lambda tables: tables.files.page(owner, page, purpose))
        return json_answer(FileList(found, has_more, *_ends([file.id for file in found])))

    async def file(self, request: web.Request) -> web.StreamResponse:
        owner, file_id = _owner(request), request.match_info["file_id"]
        return json_answer(await self._batches.call(lambda tables: tables.files.get(owner, file_id)))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """The bytes as they are."""
        owner, file_id = _owner(request), request.match_info["file_id"]
        file = await self._batches.call(lambda tables: tables.files.get(owner, file_id))
        path = await self._batches.call(lambda tables: tables.files.path(file.id))
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def delete_file(self, request: web.Request) -> web.StreamResponse:
        """An unfinished batch reads its file to the end all the same."""
        owner, file_id = _owner(request), request.match_info["file_id"]

        def delete(tables: Tables) -> None:
            tables.files.delete(owner, file_id, is_used=tables.batches.is_used(file_id))

        await self._batches.call(delete)
        return json_answer(FileDeleted(file_id))

    async def create(self, request: web.Request) -> web.StreamResponse:
        _, body = await self._answering.receive(request, lambda body: read_json(self._decoder, body))
        return json_answer(await self._batches.create(_owner(request), body))

    async def batches(self, request: web.Request) -> web.StreamResponse:
        page = parse_page(request.query, _BATCHES_PAGE, MOST_BATCHES)
        owner = _owner(request)
        found, has_more = await self._batches.call(lambda tables: tables.batches.page(owner, page))
        return json_answer(BatchList(found, has_more, *_ends([batch.id for batch in found])))

    async def batch(self, request: web.Request) -> web.StreamResponse:
        owner, batch_id = _owner(request), request.match_info["batch_id"]
        return json_answer(await self._batches.call(lambda tables: tables.batches.get(owner, batch_id)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        return json_answer(await self._batches.cancel(_owner(request), request.match_info["batch_id"]))


def _owner(request: web.Request) -> str:
    return owner_of(api_key(request))


def _ends(ids: list[str]) -> tuple[str | None, str | None]:
    return (ids[0], ids[-1]) if ids else (None, None)
