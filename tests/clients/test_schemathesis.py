"""schemathesis reads the OpenAPI document and asks for everything that it allows, and for much that it does not.

Whatever it sends: no status of 500 or beyond but those that are documented, no status and no kind of content that the
document does not have, no answer that does not come.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clients import command, needs, run
from support.served_model import save_served_model
from support.server import serving
from support.tool_model import TEMPLATE

pytestmark = [needs("schemathesis"), pytest.mark.timeout(240)]
SHORT = ("--max-model-len", "256", "--dtype", "float32", "--num-blocks", "400")
"""An answer without `max_tokens` takes the rest of the context: here soon."""
LONGEST_S = "60"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_breaks_the_server_or_the_document(tmp_path: Path) -> None:
    model = save_served_model(tmp_path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with serving(tmp_path, str(model), *SHORT) as server:
        run(
            [
                command("schemathesis", "schemathesis"), "--no-color", "run", f"{server.url}/openapi.json",
                "--checks", CHECKS, "--seed", "1", "--max-examples", "60", "--request-timeout", "30",
                "--max-time", LONGEST_S, "--suppress-health-check", "all", "--generation-database", "none",
            ],
            tmp_path,
            200,
        )  # fmt: skip
        assert server.get("/health").status_code == 200
        assert server.metric("twinpool_invariant_violations_total") == 0
        server.wait_until_empty()
