"""`GET /docs`: the OpenAPI document as a page. Nothing of it is loaded from elsewhere, so hosts without internet have
it too."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

from starlette.responses import HTMLResponse, Response

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Twinpool: the HTTP API</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<main>
<h1>Twinpool: the HTTP API</h1>
<noscript><p>This page needs scripts to show <a href="openapi.json">openapi.json</a>.</p></noscript>
</main>
<script>$script</script>
</body>
</html>
""")


async def docs() -> Response:
    """The page."""
    page, policy = _page()
    return HTMLResponse(page, headers={"content-security-policy": policy})


@cache
def _page() -> tuple[str, str]:
    """The page, and what a browser lets it do: run its script, and ask this server."""
    style, script = _asset("docs_page.css"), _asset("docs_page.js")
    policy = (
        f"default-src 'none'; img-src data:; connect-src 'self'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _PAGE.substitute(style=style, script=script), policy


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
