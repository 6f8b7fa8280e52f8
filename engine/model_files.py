"""From what the user calls a model to a directory with config.json, safetensors and a tokenizer. No torch.

Twinpool loads safetensors only: a pickled checkpoint runs code when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.engine import convert
from twinpool.engine.default_model import DEFAULT_MODEL, default_model_dir
from twinpool.engine.model_cache import cached
from twinpool.errors import ModelError

if TYPE_CHECKING:
    from twinpool.engine.progress import Progress

_WANTED_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
]
_CONFIG_FILES = ["config.json", "generation_config.json"]
_UNWANTED_FILES = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_BF16_OVER_GGUF = 8
"""Bytes of bfloat16 weights per byte of GGUF, at most: 2-bit quantization is the densest there is."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be loaded: `path` has config.json and *.safetensors, clients call it `name`."""

    path: Path
    name: str


def resolve(
    model: str | None, progress: Progress | None = None, *, needs_weights: bool = True
) -> ResolvedModel:
    """Finds, fetches and converts `model`, whichever is needed.

    `model` is None (or its name) for the built-in default, a directory, a ``.gguf`` file, or a Hugging Face
    id, tried in this order. Slow steps are told to `progress`; without one they are shown on standard error.
    Without `needs_weights` a directory may lack them, and of a hub model only the configuration is fetched.

    Raises:
        ModelError: there is no such model, it cannot be fetched, or its files are not what Twinpool loads.
    """
    if progress is None:
        from twinpool.engine.progress import ConsoleProgress  # imports rich, which workers do not need

        with ConsoleProgress() as console:
            return resolve(model, console, needs_weights=needs_weights)
    if model is None or (model == DEFAULT_MODEL and not Path(model).exists()):
        return ResolvedModel(default_model_dir(progress), DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return ResolvedModel(_checked(path, needs_weights), path.resolve().name)
    if path.suffix == ".gguf":
        return ResolvedModel(_from_gguf(path, progress), path.stem)
    if path.exists():
        raise ModelError(
            f"{model} is a file, and no .gguf; name a model directory, a .gguf file or a Hugging Face id"
        )
    if not _HUB_ID.fullmatch(model):
        raise ModelError(
            f"there is no directory {model}, and it is no Hugging Face id (like Qwen/Qwen3-0.6B)"
        )
    return ResolvedModel(_from_hub(model, progress, needs_weights), model)


def _checked(path: Path, needs_weights: bool) -> Path:
    """`path`, if its config and, where needed, all weights are there."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} has no config.json; a model directory holds config.json, *.safetensors, a tokenizer"
        )
    if not needs_weights:
        return path
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = indexed_files(index)
        if missing := sorted(shard for shard in shards if not (path / shard).is_file()):
            raise ModelError(
                f"{path} lacks {len(missing)} of {len(shards)} weight files ({missing[0]}, …); "
                "copy or fetch them too"
            )
    elif not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{path} has no *.safetensors. Pickled weights (*.bin, *.pt, *.pth) are refused, because "
            "reading them can run code; save the model with save_pretrained, or use a revision that has them"
        )
    return path


def indexed_files(index: Path) -> set[str]:
    """The names of the files that a ``model.safetensors.index.json`` names.

    Raises:
        ModelError: it is no such index.
    """
    try:
        return {str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as exc:
        raise ModelError(
            f"{index} is no index of weight files ({type(exc).__name__}: {exc}); fetch the model again"
        ) from exc


def _from_gguf(path: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    if _SHARD.search(path.name):
        raise ModelError(
            f"{path.name} is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)"
        )
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} does not begin like a GGUF file; was it fetched completely?")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    num_bytes = path.stat().st_size

    def build(target: Path) -> None:
        progress.start(f"converting {path.name} to safetensors")
        convert.run("gguf", path.resolve(), target)

    return cached(f"gguf-{digest[:32]}-v{convert.CONVERTER_VERSION}", _BF16_OVER_GGUF * num_bytes, build)


def _from_hub(model_id: str, progress: Progress, needs_weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if not constants.HF_HUB_OFFLINE:
        progress.start(f"looking for {model_id} on the Hugging Face hub")
    wanted = _WANTED_FILES if needs_weights else _CONFIG_FILES
    try:
        path = snapshot_download(model_id, allow_patterns=wanted, ignore_patterns=_UNWANTED_FILES)
    except GatedRepoError as exc:
        raise ModelError(
            f"{model_id} is gated: accept its terms on its page, then log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from exc
    except RepositoryNotFoundError as exc:
        raise ModelError(
            f"the hub has no model {model_id} that you may see; check the spelling, or log in"
        ) from exc
    except LocalEntryNotFoundError as exc:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelError(
            f"{model_id} is neither a directory here nor in the Hugging Face cache, and {reason}. "
            f"Fetch it once while online (`hf download {model_id}`), or name a directory, a .gguf file, "
            f"or no model for {DEFAULT_MODEL}"
        ) from exc
    except (HfHubHTTPError, OSError) as exc:
        raise ModelError(f"{model_id} could not be fetched from the hub: {exc}") from exc
    return _checked(Path(path), needs_weights)
