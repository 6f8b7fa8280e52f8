"""Starts one prefill and one decode worker, asks the model a question, streams the answer, prints the timeline.

Run it with `make demo`. `python examples/demo.py "Your question"` asks something else.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx

QUESTION = "What is the capital of France, and what is it known for? Answer in two sentences."
START_LIMIT_S = 120.0
BAR = 32


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"demo: the server ended with status {server.returncode}; its last lines above say why")
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    sys.exit(f"demo: the server was not ready within {START_LIMIT_S:.0f} s")


def ask(client: httpx.Client, question: str) -> str:
    """Streams the answer to the terminal; returns the request's id."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 120,
        "temperature": 0,
        "stream": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            sys.exit(f"demo: the server answered {response.status_code}: {response.text}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                sys.exit(f"demo: {event['error']['message']}")
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
        print()
        return response.headers["x-request-id"]


def print_timeline(timeline: dict[str, Any]) -> None:
    """The request's stages as bars on one time axis, and what its KV transfer moved."""
    stages = timeline["stages_s"]
    prefill, transfer = timeline["prefill"], timeline["transfer"]
    attempt = timeline["attempts"][-1]
    notes = {
        "prefill": f"{prefill['num_computed_tokens']} of {timeline['num_prompt_tokens']} prompt tokens computed, "
        f"on {attempt['prefill_worker']}",
        "decode": f"{timeline['num_output_tokens']} tokens, all but the first on {attempt['decode_worker']}",
    }
    if transfer:
        notes["transfer"] = (
            f"{transfer['num_bytes'] / 1e6:.2f} MB by {transfer['transport']} at {transfer['gb_per_s']:.1f} GB/s, "
            f"{transfer['num_blocks_sent']} blocks sent, {transfer['num_blocks_cached']} already there"
        )
    shown = [name for name in ("queue", "prefill", "transfer", "decode") if name in stages]
    total = sum(stages[name] for name in shown)
    print(f"\nrequest {timeline['request_id']}: first token after {timeline['ttft_s'] * 1000:.0f} ms")
    before = 0.0
    for name in shown:
        start, length = (round(BAR * part / total) for part in (before, stages[name]))
        bar = " " * start + "█" * max(1, length)
        print(f"  {name:<9}{stages[name] * 1000:9.1f} ms  {bar:<{BAR + 1}}  {notes.get(name, '')}")
        before += stages[name]


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # keeps the order with the server's log when piped
    question = " ".join(sys.argv[1:]) or QUESTION
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "twinpool",
        "serve",
        "--prefill",
        "1",
        "--decode",
        "1",
        "--port",
        str(port),
    ]
    started = time.monotonic()
    server = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            wait_until_ready(client, server)
            print(f"\nready after {time.monotonic() - started:.1f} s\n\n> {question}\n")
            request_id = ask(client, question)
            print_timeline(client.get(f"/v1/requests/{request_id}/timeline").json())
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    main()
