"""The built-in page: files of one folder, and headers that let it load nothing but them.

Refuses to know what the page shows; it has no secrets, so it needs no key.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",  # an update of the package is seen at once
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """The files at /static/, with the page's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file, or StaticFiles' own 404."""
        # Windows' registry may call a script plain text, which nosniff would keep from running.
        mimetypes.add_type("text/javascript", ".js")
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_router(index: Path) -> APIRouter:
    """The page at /."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(index, headers=HEADERS)

    return router
