"""Rewrites a model's files with transformers, in a process of its own, so that no server process imports it.

`python -m twinpool.engine.convert gguf FILE TARGET` writes config, bfloat16 safetensors, tokenizer and chat
template; `python -m twinpool.engine.convert tokenizer DIRECTORY TARGET` writes tokenizer.json and what
belongs to it. What goes wrong is one line on standard error and status 1. Other modules call `run`, which
imports none of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import twinpool
from twinpool.errors import ModelError

CONVERTER_VERSION = 1
"""Part of every cache key: a new number makes every model be converted again."""


def run(kind: str, source: Path, target: Path) -> None:
    """Converts `source` (kind "gguf": a file; "tokenizer": a directory) into the existing directory `target`.

    Raises:
        ModelError: transformers cannot read `source`; with its reason.
    """
    package_root = str(Path(twinpool.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, kind, str(source), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the converter ended with status {done.returncode}"]
        raise ModelError(f"{source} cannot be converted: {lines[-1]}")


def convert_gguf(source: Path, target: Path) -> None:
    """Dequantizes `source` into bfloat16 safetensors: half of float32's size, on disk and to load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    # A model loaded from GGUF still counts as quantized and cannot be saved; its weights are plain by now.
    model.hf_quantizer = None  # type: ignore[assignment]
    del model.config.quantization_config
    model.save_pretrained(target)


def convert_tokenizer(source: Path, target: Path) -> None:
    """Writes the fast form of the tokenizer in `source`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source))
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no fast form (tokenizer.json)")
    tokenizer.save_pretrained(target)


def main(kind: str, source: str, target: str) -> int:
    """Runs one conversion; returns the exit status."""
    convert = {"gguf": convert_gguf, "tokenizer": convert_tokenizer}[kind]
    try:
        convert(Path(source), Path(target))
    except Exception as exc:  # noqa: BLE001  # the process border: whatever it is becomes one line for the parent
        print(" ".join(f"{type(exc).__name__}: {exc}".split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
