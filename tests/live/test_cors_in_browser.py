"""A web page of another origin, in a real browser, against a real socket."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from support.browser import look
from support.http_gateway import running

pytestmark = pytest.mark.timeout(120)
PAGE = """<!doctype html><body><script>
const found = document.body.appendChild(document.createElement("output"));
fetch("URL/v1/chat/completions", {
  method: "POST",
  headers: {"content-type": "application/json", "authorization": "Bearer none", "x-request-id": "of-page"},
  body: JSON.stringify({messages: [{role: "user", content: "Hi"}], stream: true}),
}).then(async answer => {
  const text = await answer.text();
  found.textContent = [answer.status, answer.headers.get("x-request-id"), text.includes("[DONE]")].join(" ");
}).catch(error => { found.textContent = error.name; });
</script></body>"""


@pytest.mark.parametrize(
    ("origins", "expected"),
    [(("null",), "200 of-page true"), (("https://other.example",), "TypeError")],
)
async def test_a_page_gets_an_answer_if_its_origin_may(
    tmp_path: Path, origins: tuple[str, ...], expected: str
) -> None:
    """A page from a file is of the origin `null`. The key in a header of its own makes the browser ask beforehand."""
    async with running(cors_origins=origins) as gateway:
        page = tmp_path / "page.html"
        page.write_text(PAGE.replace("URL", gateway.url))
        seen = await asyncio.to_thread(look, page, width=200, height=200)
    output = re.search(r"<output>(.*?)</output>", seen.dom)
    assert output is not None, seen.dom
    assert output[1] == expected, seen.console
    assert bool(gateway.service.submissions) == (expected != "TypeError"), "the browser asked beforehand"
