"""What the process that predicts is asked, and what it answers: messages on its standard streams."""

from __future__ import annotations

import msgspec

from twinpool.bench.serving.slo import Slo
from twinpool.config import SchedulerConfig
from twinpool.layout import KVLayout
from twinpool.planner.autotune.words import PastTraffic, Prediction, Sizes
from twinpool.planner.profile.saved import Profile


class LiveQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be predicted, of workers of `profile`, whose KV travels by `transport` (None: as a server would have
    it here). `sizes`: as in `predict`. `seconds` is what it may take."""

    profile: Profile
    transport: str | None
    kv: KVLayout
    num_blocks: int
    max_model_len: int
    scheduler: SchedulerConfig
    max_queue_requests: int
    max_queue_tokens: int
    max_wait_s: float
    slo: Slo
    attainment: float
    traffic: PastTraffic
    prefill: int
    decode: int
    sizes: Sizes | None
    seconds: float


class Answer(msgspec.Struct, frozen=True):
    """The prediction, or why there is none."""

    prediction: Prediction | None
    reason: str = ""
