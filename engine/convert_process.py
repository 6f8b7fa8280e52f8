"""The converter's own process, which `engine.convert` starts: reads a model with transformers, writes it anew.

`python -m twinpool.engine.convert_process gguf FILE TARGET` writes config, bfloat16 safetensors, tokenizer and chat
template; with `tokenizer DIRECTORY TARGET` it writes tokenizer.json and what belongs to it. What goes wrong is one
line on standard error and status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert_gguf(source: Path, target: Path) -> None:
    """Dequantizes `source` into bfloat16 safetensors: half of float32's size, on disk and to load."""
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    # A model loaded from GGUF still counts as quantized and cannot be saved; its weights are plain by now.
    model.hf_quantizer = None  # type: ignore[assignment]
    del model.config.quantization_config
    model.save_pretrained(target)


def convert_tokenizer(source: Path, target: Path) -> None:
    """Writes the fast form of the tokenizer in `source`."""
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
