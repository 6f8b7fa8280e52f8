"""`twinpool serve`: a coordinator, its HTTP endpoint, and the workers of this host."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from twinpool.commands.flags import add_worker_flags, forwarded, scheduler_config
from twinpool.config import CoordinatorConfig, PoolPlan, require
from twinpool.coordinator.launch import WorkerSpec, share_cores, usable_cores

_actions: list[argparse.Action] = []
