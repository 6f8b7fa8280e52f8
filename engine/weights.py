"""Reading a model directory's safetensors: memory-mapped, by name, and a quick fingerprint of what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from twinpool.engine.model_config import ModelConfig
from twinpool.engine.model_files import indexed_files
from twinpool.errors import ModelError

_SAMPLE_BYTES = 1 << 20


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, in order of their names.

    Raises:
        ModelError: there is none, or one that the index names is absent.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(indexed_files(index))
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if absent := [file.name for file in files if not file.exists()]:
        raise ModelError(
            f"{directory} lacks {', '.join(absent)}, which its index names; fetch the model again"
        )
    if not files:
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        hint = (
            "; its pickled weights could run code and are not read: convert them to safetensors"
            if pickled
            else ""
        )
        raise ModelError(f"{directory} has no .safetensors file{hint}")
    return files


def fingerprint(config: ModelConfig, directory: Path) -> str:
    """A name for the model's shape and weights: 32 hex digits. Equal models have equal ones.

    Of each file the header, the size, and the first and the last MiB are looked at, so huge models take no longer.
    """
    digest = blake2b(repr(config).encode(), digest_size=16)
    for path in weight_files(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(f"{size}:{header_bytes}".encode())
            digest.update(file.read(min(header_bytes + _SAMPLE_BYTES, size)))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class Weights:
    """A model's tensors by name, read from the mapped files when asked for. Use as a context manager."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Opens the files. Tensors come as `dtype` on `device`.

        Raises:
            ModelError: a file is absent or damaged.
        """
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._owner: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                self._stack.close()
                raise ModelError(
                    f"{path} is no readable safetensors file: {exc}; fetch the model again"
                ) from exc
            self._owner.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`.

        Raises:
            ModelError: it is absent, or has another shape.
        """
        if name not in self._owner:
            raise ModelError(
                f"{self._directory} has no tensor {name!r}; its config.json and weights do not match"
            )
        tensor: torch.Tensor = self._owner[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name} in {self._directory} has shape {tuple(tensor.shape)}; its config.json says {shape}"
            )
        return tensor.to(device=self._device, dtype=self._dtype)

    def fused(self, names: list[str], rows: list[int], columns: int) -> torch.Tensor:
        """The matrices `names`, of `rows[i]` × `columns`, stacked into one."""
        return torch.cat([self.get(name, (n, columns)) for name, n in zip(names, rows, strict=True)])

    def fused_bias(self, names: list[str], sizes: list[int]) -> torch.Tensor:
        """The vectors `names`, of `sizes[i]`, one after the other."""
        return torch.cat([self.get(name, (n,)) for name, n in zip(names, sizes, strict=True)])
