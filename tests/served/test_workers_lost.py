"""Processes that die: every request has a clear outcome, blocks come back, others go on, nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.served_model import save_served_model
from support.server import Server, server_environment, serving, wait_for

pytestmark = pytest.mark.timeout(180)
FIXED = ("--dtype", "float32")
NUM_TOKENS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model."""
    return str(save_served_model(tmp_path_factory.mktemp("model")))


def stream(server: Server, prompt: str, max_tokens: int) -> tuple[str, str]:
    """The text that came and how the stream ended: a finish reason, "error", or "broken" (no terminal event)."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    text, end = "", "broken"
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=90) as response:
        if response.status_code != 200:
            return "", f"status {response.status_code}"
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return text, "error"
            for choice in event["choices"]:
                text += choice["text"]
                end = choice["finish_reason"] or end
    return text, end


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_killed_in_traffic(tmp_path: Path, model: str, victim: str) -> None:
    """Two of each pool; one is killed while eight streams run. All end with the undisturbed text, or an error."""
    prompts = [f"Story number {n}. In the beginning" for n in range(8)]
    with serving(tmp_path, model, *FIXED, "--prefill", "2", "--decode", "2") as server:
        undisturbed = [stream(server, prompt, NUM_TOKENS) for prompt in prompts]
        assert {end for _, end in undisturbed} == {"length"}
        pid = server.worker_pids()[victim]
        pools = [path for path in Path("/dev/shm").glob(f"twinpool.*.{victim}.*") if _is_mapped_by(path, pid)]
        delivered = server.metric("twinpool_delivered_tokens_total")
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(stream, server, prompt, NUM_TOKENS) for prompt in prompts]
            wait_for(
                "streams are on their way",
                lambda: server.metric("twinpool_delivered_tokens_total") > delivered + 40,
            )
            os.kill(pid, signal.SIGKILL)
            outcomes = [future.result() for future in running]
        for (text, end), (wanted, _) in zip(outcomes, undisturbed, strict=True):
            assert end in ("length", "error"), end
            assert text == wanted if end == "length" else wanted.startswith(text)
        assert sum(end == "length" for _, end in outcomes) >= 4, "the other pair of workers was disturbed"
        wait_for("the worker is started again", lambda: victim in server.worker_pids(), 30)
        wait_for("and joins", lambda: server.metric("twinpool_workers") == 4, 30)
        assert not any(path.exists() for path in pools), "it left its pool in shared memory"
        assert stream(server, prompts[0], NUM_TOKENS) == undisturbed[0]
        server.wait_until_empty()


def test_no_process_outlives_a_killed_coordinator(tmp_path: Path, model: str) -> None:
    """SIGKILL gives the coordinator no time to tell anybody; the workers still end, and leave no shared memory."""
    with serving(tmp_path, model, *FIXED) as server:
        workers = server.worker_pids()
        assert set(workers) == {"prefill-0", "decode-0"}
        own = [
            path for path in Path("/dev/shm").glob("twinpool.*") if _is_mapped_by(path, workers["decode-0"])
        ]
        assert own
        server.process.kill()
        server.process.wait()
        wait_for("the workers end", lambda: not any(is_alive(pid) for pid in workers.values()), 10)
        assert not any(path.exists() for path in own)


def _is_mapped_by(path: Path, pid: int) -> bool:
    # By inode: the owner mapped the file before it had a name.
    inode = str(path.stat().st_ino)
    return any(line.split()[4] == inode for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def test_ctrl_c_while_the_workers_load_ends_at_once(tmp_path: Path) -> None:
    """They cannot hear the coordinator yet, so nobody waits for their goodbye."""
    log_path = tmp_path / "serve.log"
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "twinpool", "serve", "--port", "0", *FIXED]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=server_environment())
        try:
            server = Server(process, "", log_path)
            wait_for("both workers are started", lambda: len(server.worker_pids()) == 2, 60)
            workers = server.worker_pids()
            process.send_signal(signal.SIGINT)
            assert process.wait(4.5) == 0
        finally:
            process.kill()
            process.wait()
    assert not any(is_alive(pid) for pid in workers.values())
    assert "Traceback" not in log_path.read_text()


def test_sigterm_lets_running_streams_end_and_admits_no_new_ones(tmp_path: Path, model: str) -> None:
    """Draining: what runs ends whole, what comes is refused, then everything stops with status 0."""
    with serving(tmp_path, model, *FIXED) as server, ThreadPoolExecutor(1) as pool:
        workers = server.worker_pids()
        running = pool.submit(stream, server, "A long story about the sea:", 3000)
        wait_for("the stream runs", lambda: server.metric("twinpool_delivered_tokens_total") > 3)
        server.process.send_signal(signal.SIGTERM)
        wait_for("the server says that it drains", lambda: server.get("/ready").status_code == 503)
        refused = server.post("/v1/completions", {"prompt": "too late", "max_tokens": 1})
        assert refused.status_code == 503
        text, end = running.result()
        assert (bool(text), end) == (True, "length")
        assert server.process.wait(20) == 0
        assert not any(is_alive(pid) for pid in workers.values())


def test_a_full_queue_answers_429_with_retry_after(tmp_path: Path, model: str) -> None:
    """One running, two waiting; the next is refused at once and told when to come back."""
    with (
        serving(tmp_path, model, *FIXED, "--max-num-seqs", "1", "--max-queue-requests", "2") as server,
        ThreadPoolExecutor(12) as pool,
    ):
        body = {"prompt": "A story:", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(12)))
        codes = sorted(answer.status_code for answer in answers)
        assert set(codes) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        server.wait_until_empty()
