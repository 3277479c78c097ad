"""`GET /roles` and `POST /roles`: what each worker does, and changing it while requests run."""

import msgspec
from aiohttp import web

from ..core.errors import RequestError
from ..core.messages import Role
from .bodies import read_body
from .openai.answers import encode_json
from .role_table import RoleTable


class RolesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is posted: `{"worker": "decode-0", "roles": ["prefill", "decode"]}`."""

    worker: str
    roles: list[Role]


def role_routes(table: RoleTable) -> list[web.RouteDef]:
    """Bound to one gateway's table."""

    async def get(request: web.Request) -> web.StreamResponse:
        return _answer(table)

    async def post(request: web.Request) -> web.StreamResponse:
        """Answers once the worker has said that it has the roles."""
        try:
            body = msgspec.json.decode(await read_body(request), type=RolesBody)
        except msgspec.DecodeError as error:
            raise RequestError(
                f'{error}. Post {{"worker": NAME, "roles": ["prefill", "decode"]}}; GET /roles names the workers'
            ) from None
        await table.change(body.worker, body.roles)
        return _answer(table)

    return [web.get("/roles", get), web.post("/roles", post)]


def _answer(table: RoleTable) -> web.Response:
    return web.Response(body=encode_json(table.describe()), content_type="application/json")
