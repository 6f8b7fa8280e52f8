"""Live tuning beside a real server: a recommendation by a process that predicts, and later what was measured."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
from support.fleet import SETTINGS
from support.made_profiles import made_profile
from support.served_model import save_served_model
from support.server import serving, wait_for

from twinpool.cli import main
from twinpool.coordinator.gateway.key_ring import new_key
from twinpool.planner.autotune.window import LEAST_REQUESTS
from twinpool.planner.profile.saved import save_profile

WINDOW_S = 4
AT_ONCE = 8


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_recommendation_is_made_logged_and_held_against_what_came(tmp_path: Path, capsys: Any) -> None:
    """The made-up profile is not this machine's, so only that there is an error is looked at, not how large."""
    (tmp_path / "model").mkdir()
    model, log, key = save_served_model(tmp_path / "model"), tmp_path / "tune.jsonl", new_key()
    profile = tmp_path / "profile.json"
    save_profile(msgspec.structs.replace(made_profile(), model="tiny"), profile)
    arguments = (
        str(model), "--served-model-name=tiny", *SETTINGS, "--prefill=1", "--decode=1",
        "--autotune=advise", f"--profile={profile}", "--slo=ttft=2s", "--slo=itl=200ms",
        f"--autotune-window={WINDOW_S}", f"--autotune-log={log}",
    )  # fmt: skip

    def one(number: int) -> int:
        body = {"model": "tiny", "prompt": f"question {number}", "max_tokens": 8, "ignore_eos": True}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, verify=False).status_code

    with (
        serving(tmp_path, *arguments, environment={"TWINPOOL_ADMIN_KEY": key}) as server,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):
        num_told = -1

        def is_measured() -> bool:
            """Traffic comes at first and after each recommendation: then processors are left to predictions."""
            nonlocal num_told
            found = lines(log)
            if (now_told := sum(line["kind"] == "recommendation" for line in found)) > num_told:
                num_told = now_told
                assert set(clients.map(one, range(LEAST_REQUESTS + 4))) == {200}
            return any(line["kind"] == "measured" and line["figures"] for line in found)

        wait_for("a recommendation is made and measured", is_measured, 150)
        assert server.metric("twinpool_autotune_recommendations_measured_total") >= 1
        assert server.metric("twinpool_autotune_median_error", figure="ttft_p50_s") >= 0
        assert server.metric("twinpool_autotune_changes_total") == 0
        assert main(["pools", "--url", server.url, "--admin-key", key]) == 0
        shown = capsys.readouterr().out
        assert "autotune advise: 1P1D serves" in shown
        assert "median error" in shown
    measured = next(line for line in lines(log) if line["kind"] == "measured" and line["figures"])
    told = next(line for line in lines(log) if line["number"] == measured["number"])
    assert told["kind"] == "recommendation"
    assert told["action"] == "stayed"
    assert told["stay"]["figures"]["ttft_p50_s"] > 0
    assert told["stay"]["capacity_per_s"] > 0
    assert measured["layout"] == "1P1D"
    assert "ttft_p50_s" in measured["errors"]
