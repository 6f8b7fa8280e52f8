"""`twinpool chat`: talks to a running server from the terminal, over the same HTTP as any client."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from twinpool.errors import ConfigError, RequestError, RequestFailed

if TYPE_CHECKING:
    import httpx

API_KEY_VARIABLE = "TWINPOOL_API_KEY"
_CONNECT_TIMEOUT_S = 5.0
_SILENCE_TIMEOUT_S = 300.0

Message = dict[str, str]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describes the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a running server",
        description="Talks to a running server. Ctrl-C stops an answer, Ctrl-D leaves.",
    )
    parser.add_argument(
        "message", nargs="?", metavar="MESSAGE", help="ask this only, print the answer and leave"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the model's name (default: the first that is served)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"your key, if the server needs one (better in {API_KEY_VARIABLE}: others see the arguments of a command)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Asks one question, or talks until end of input.

    Raises:
        ConfigError: no server answers at --url.
        RequestError: the server refused or lost the one question.
    """
    import httpx

    options = {name: getattr(args, name) for name in ("max_tokens", "temperature")}
    options = {name: value for name, value in options.items() if value is not None}
    history: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
    key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    try:
        url = args.url.rstrip("/").removesuffix("/v1")
        with httpx.Client(base_url=url, timeout=timeout, headers=headers) as client:
            options["model"] = args.model or _first_model(client)
            if args.message is not None:
                _answer(client, [*history, {"role": "user", "content": args.message}], options)
            else:
                _converse(client, history, options)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
        raise ConfigError(
            f"no server answers at {args.url} ({exc}); start one with `twinpool serve`, or name it with --url"
        ) from exc
    except httpx.HTTPError as exc:
        raise RequestFailed(f"the connection to {args.url} broke: {exc or type(exc).__name__}") from exc
    return 0


def _converse(client: httpx.Client, history: list[Message], options: dict[str, Any]) -> None:
    with suppress(ImportError):  # line editing, where the platform has it
        importlib.import_module("readline")
    print(f"{options['model']} at {client.base_url}. Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if not question:
            continue
        asked = [*history, {"role": "user", "content": question}]
        try:
            answer = _answer(client, asked, options)
        except RequestError as exc:
            print(f"\ntwinpool: {exc}", file=sys.stderr)
            continue
        history[:] = [*asked, {"role": "assistant", "content": answer}]


def _answer(client: httpx.Client, messages: list[Message], options: dict[str, Any]) -> str:
    """Prints the answer as it comes and returns it. Ctrl-C ends it, here and on the server."""
    body = {**options, "messages": messages, "stream": True}
    answer = ""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            for text in _texts(response):
                print(text, end="", flush=True)
                answer += text
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return answer


def _texts(response: httpx.Response) -> Iterator[str]:
    """The pieces of a streamed answer. Raises RequestFailed unless the stream says that it is complete."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            yield choice["delta"].get("content") or ""
    raise RequestFailed("the stream broke off before the answer was complete")


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.is_error:
        raise _refusal(response)
    try:
        name: str = response.json()["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise RequestFailed(f"{response.url} does not list models as an OpenAI server does") from exc
    return name


def _refusal(response: httpx.Response) -> RequestError:
    """The server's own words, if they come in the OpenAI shape."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    if response.status_code == 401:
        message += f"; give yours in {API_KEY_VARIABLE}"
    return RequestFailed(f"{message} (HTTP {response.status_code})")
