"""A headless Chromium that looks at a page: what it drew, what its scripts made, what they complained about."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
_LIMIT_S = 60
_CONSOLE = re.compile(r":CONSOLE[:(].*")


@dataclass(frozen=True)
class Look:
    """One look at a page. `pixels` is [height, width, 3], 0 to 255; `console` has what scripts or the browser said."""

    dom: str
    pixels: np.ndarray
    console: list[str]

    @property
    def num_colors(self) -> int:
        """How many different colours there are."""
        red, green, blue = np.moveaxis(self.pixels.astype(np.uint32), 2, 0)
        return len(np.unique(red << 16 | green << 8 | blue))


def find_browser() -> str:
    """Its program; skips the test, saying what to install, if there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            "NO BROWSER: no page was looked at; run scripts/install_browser (Debian: apt-get install chromium)"
        )
    return found


def look(page: Path, *, width: int = 1200, height: int = 1600, is_dark: bool = False) -> Look:
    """Opens the file, lets its scripts run, and tells what there is. Raises CalledProcessError, TimeoutExpired."""
    browser = find_browser()
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        common = [
            browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", f"--user-data-dir={folder}/profile", f"--window-size={width},{height}",
            "--virtual-time-budget=4000", "--enable-logging=stderr", "--v=0",
        ]  # fmt: skip
        if os.geteuid() == 0:
            common.append("--no-sandbox")
        if is_dark:
            common.append("--blink-settings=preferredColorScheme=0")
        command = [*common, f"--screenshot={shot}", "--dump-dom", page.as_uri()]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        pixels = np.round(imread(shot)[..., :3] * 255).astype(np.uint8)
        return Look(ended.stdout, pixels, _CONSOLE.findall(ended.stderr))
