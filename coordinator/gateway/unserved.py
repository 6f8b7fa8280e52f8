"""Routes of OpenAI's and vLLM's that this server does not have: answered by name, so that nobody looks for a typo."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request, Response

from twinpool.errors import NotServed

SERVED = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /tokenize and /detokenize"
UNSERVED: Mapping[str, str] = {
    "/v1/embeddings": "embeddings are",
    "/v1/score": "scores are",
    "/score": "scores are",
    "/v1/rerank": "reranking is",
    "/v2/rerank": "reranking is",
    "/rerank": "reranking is",
    "/pooling": "pooling is",
    "/classify": "classification is",
    "/v1/moderations": "moderation is",
    "/v1/audio": "audio is",
    "/v1/images": "images are",
    "/v1/videos": "videos are",
    "/v1/realtime": "realtime sessions are",
    "/v1/assistants": "assistants are",
    "/v1/threads": "threads are",
    "/v1/conversations": "stored conversations are",
    "/v1/files": "files are",
    "/v1/uploads": "uploads are",
    "/v1/batches": "batches are",
    "/v1/messages/batches": "batches are",
    "/v1/vector_stores": "vector stores are",
    "/v1/fine_tuning": "fine-tuning is",
}
"""What is not served here, by path; nor is what is below it."""
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def mount_unserved(app: FastAPI) -> None:
    """Has `app` say of each of these paths, and of those below them, that it is not served."""
    for path, what in UNSERVED.items():
        for route in (path, f"{path}/{{rest:path}}"):
            app.add_api_route(route, _refusal(what), methods=_METHODS, include_in_schema=False)


def _refusal(what: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise NotServed(f"{request.url.path}: {what} not served; this server generates text, by {SERVED}")

    return refuse
