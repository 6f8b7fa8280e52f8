"""Whether workers of this host can have a CUDA device, as far as is known without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from collections.abc import Sequence

from twinpool.config import require


def why_no_cuda() -> str | None:
    """Why torch finds no CUDA device here, whatever it tries; None if it may find one."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if version.endswith("+cpu"):
        return f"torch {version} is built without CUDA"
    if sys.platform == "linux" and "rocm" not in version:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no CUDA driver, libcuda.so.1"
    return None


def check_devices(setting: str, devices: Sequence[str], kv_cache_dtype: str) -> None:
    """Refuses what no worker could start with: devices that are not here, and KV in 8 bits without a GPU. `devices`
    are the workers', as `setting` gave them.

    Raises:
        ConfigError: it is so for certain.
    """
    on_gpu = [device for device in devices if device.startswith("cuda")]
    if (not on_gpu and kv_cache_dtype == "auto") or (reason := why_no_cuda()) is None:
        return
    require(setting, ",".join(dict.fromkeys(on_gpu)), not on_gpu, f"cpu here, for {reason}")
    require("--kv-cache-dtype", kv_cache_dtype, kv_cache_dtype == "auto", f"auto here, for {reason}")
