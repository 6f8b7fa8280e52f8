"""Whether one hybrid worker runs a request alone: the predicted times of every way, and which is the soonest.

A hybrid decode worker can compute a prompt itself, beside its streams; a hybrid prefill worker can generate itself,
beside its prompts. Predictions are made of what each hybrid measured of its steps (`WorkerStats.pace`) and of what the
coordinator knows to be there now: what the last heartbeat says of the load is old already.

The workers keep the streams' ITL budget whatever is chosen here. Where a budget leaves no room for chunks, none are
predicted to be computed, so nothing is sent there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from twinpool.config import Role
from twinpool.coordinator.lifecycle import Request
from twinpool.coordinator.pace import AnswerLengths
from twinpool.coordinator.registry import Registry
from twinpool.coordinator.timeline import Excluded, Exclusion, Prediction, Way
from twinpool.coordinator.worker import Worker
from twinpool.step_pace import LEAST_CHUNK_TOKENS, StepPace

LEAST_GAIN = 0.1
"""By this part of what it replaces the other way must be sooner: predictions err, and the split disturbs nobody."""
ALONE_CHUNK_TOKENS = 256
"""What a prefill worker without streams computes in one step, about."""
MAX_RECORDED = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """The way to run an attempt, on `worker` alone unless split; what was compared, the way that won first; and the
    hybrids that were excluded, with the reason."""

    way: Way
    worker: Worker | None
    predictions: tuple[Prediction, ...]
    excluded: tuple[Excluded, ...]


class HybridChooser:
    """Compares ways: a function of the registry, the request, how much of it workers should hold, and past answers.

    `matched` gives the prompt tokens that a worker should hold; `answers` the lengths of past answers.
    """

    def __init__(
        self, registry: Registry, matched: Callable[[Request, Worker], int], answers: AnswerLengths
    ) -> None:
        self._registry = registry
        self._matched = matched
        self._answers = answers

    def choose(
        self,
        request: Request,
        pair: tuple[Worker, Worker] | None,
        pairs: Callable[[], Iterator[tuple[Worker, Worker]]],
        able: Callable[[], Iterator[Worker]],
    ) -> Choice | None:
        """The soonest way; None if no worker is a hybrid.

        `pair` is where the request goes if split, None if it would have to wait for one of `pairs`. `able` are the
        hybrids that could take it whole. On no evidence it is split.
        """
        hybrids = self._registry.hybrids
        if not hybrids:
            return None
        candidates = [pair] if pair else list(pairs())
        splits = [(p, c) for c in candidates if (p := self._split(request, *c)) is not None]
        if len(splits) < len(candidates):
            return Choice(Way.SPLIT, None, (), _told((w, Exclusion.UNKNOWN_SPLIT) for w in hybrids))
        split = min(splits, key=_soonest, default=None)
        with_room = set(able())
        wholes, helping = list[tuple[Prediction, Worker]](), list[tuple[Prediction, Worker]]()
        refused = list[tuple[Worker, Exclusion]]()
        for worker in hybrids:
            found = self._whole(request, worker) if worker in with_room else Exclusion.NO_ROOM
            if isinstance(found, Exclusion):
                refused.append((worker, found))
                continue
            wholes.append((found, worker))
            if split is None or (reason := self._against(request, found, worker, *split)) is None:
                helping.append((found, worker))
            else:
                refused.append((worker, reason))
        compared = [p for p, _ in sorted((*splits, *wholes), key=_soonest)]
        if not helping:
            predictions = _first(None if split is None else split[0], compared)
            return Choice(Way.SPLIT, None, predictions, _told(refused))
        best, worker = min(helping, key=_soonest)
        return Choice(best.way, worker, _first(best, compared), _told(refused))

    def _against(
        self,
        request: Request,
        whole: Prediction,
        worker: Worker,
        split: Prediction,
        pair: tuple[Worker, Worker],
    ) -> Exclusion | None:
        """Why the request should rather be split, though `worker` could run it whole; None if it should not."""
        if not _is_worth_it(whole, split):
            return Exclusion.LITTLE_GAIN
        return None if self._has_less_to_do(request, worker, *pair) else Exclusion.BUSIER

    def _has_less_to_do(self, request: Request, worker: Worker, prefill: Worker, decode: Worker) -> bool:
        """Whether `worker` would help the one of the pair whose part it takes: where all are idle, nobody does."""
        if worker.role is Role.DECODE:
            return self._tokens_before(request, worker) < self._tokens_before(request, prefill)
        return worker.num_sequences < decode.num_sequences

    def _split(self, request: Request, prefill: Worker, decode: Worker) -> Prediction | None:
        first_s, pace = self._prompt_s(request, prefill), decode.pace
        link = self._registry.link(prefill, decode)
        if first_s is None or pace is None or link is None:
            return None
        layout, num_sent = decode.info.layout, request.num_tokens - self._matched(request, decode)
        transfer_s = num_sent * layout.block_bytes / layout.block_size / (1e9 * max(link.gb_per_s, 1e-3))
        # Layers travel, and the decode worker computes prompts of its own, while this one is computed.
        beside_s = max(transfer_s, decode.pending_tokens * pace.prompt_token_s)
        rest_s = max(0.0, beside_s - first_s) + self._decode_s(request, decode, pace)
        return Prediction(Way.SPLIT, prefill.worker_id, decode.worker_id, first_s, rest_s)

    def _whole(self, request: Request, worker: Worker) -> Prediction | Exclusion:
        first_s, pace = self._prompt_s(request, worker), worker.pace
        if first_s is None or pace is None:
            return Exclusion.UNKNOWN_PACE
        if not worker.has_room_for_whole(worker.num_sequences):
            return Exclusion.BUDGET
        rest_s = self._decode_s(request, worker, pace)
        return Prediction(_way(worker), worker.worker_id, worker.worker_id, first_s, rest_s)

    def _prompt_s(self, request: Request, worker: Worker) -> float | None:
        """How long what waits there and then this prompt take; None if nothing is known."""
        pace, num_sequences = worker.pace, worker.num_sequences
        if pace is None:
            return None
        chunk_tokens = ALONE_CHUNK_TOKENS
        if worker.role is Role.DECODE or num_sequences:
            chunk_tokens = max(LEAST_CHUNK_TOKENS, worker.prompt_tokens_beside(num_sequences))
        return pace.prompt_s(self._tokens_before(request, worker), num_sequences, chunk_tokens)

    def _tokens_before(self, request: Request, worker: Worker) -> int:
        """The prompt tokens to compute there until this request's first token."""
        return worker.pending_tokens + max(1, request.num_tokens - self._matched(request, worker))

    def _decode_s(self, request: Request, worker: Worker, pace: StepPace) -> float:
        most = request.submission.sampling.max_tokens - len(request.emitted)
        num_steps = max(0.0, self._answers.expected(most) - 1)
        return num_steps * pace.decode_step_s(worker.num_sequences + 1)


def capability(worker: Worker) -> str:
    """What a hybrid whose pace is known can do within its budget, in a sentence for the log."""
    budget_ms = 1e3 * (worker.info.itl_budget_s or 0.0)
    alone, beside_one = worker.prompt_tokens_beside(0), worker.prompt_tokens_beside(1)
    room = f"{alone} prompt tokens without streams and {beside_one} beside one"
    if worker.has_room_for_whole(0):
        return f"hybrid {worker.worker_id}: within --itl-budget {budget_ms:g} a step takes {room}"
    return (
        f"hybrid {worker.worker_id} cannot help the other pool: within --itl-budget {budget_ms:g} a step takes {room}; "
        "raise it, or run without --hybrid"
    )


def _way(worker: Worker) -> Way:
    """The way of what runs whole there."""
    return Way.LOCAL_PREFILL if worker.role is Role.DECODE else Way.LOCAL_DECODE


def _told(refused: Iterable[tuple[Worker, Exclusion]]) -> tuple[Excluded, ...]:
    """The first `MAX_RECORDED` of them, for the timeline."""
    return tuple(Excluded(_way(w), w.worker_id, reason) for w, reason in islice(refused, MAX_RECORDED))


def _is_worth_it(whole: Prediction, split: Prediction) -> bool:
    replaced_s = split.first_token_s if whole.way is Way.LOCAL_PREFILL else split.rest_s
    return split.total_s - whole.total_s > LEAST_GAIN * replaced_s


def _soonest(found: tuple[Prediction, object]) -> tuple[float, str, str]:
    """The order of predictions; equal ones by name."""
    prediction = found[0]
    return prediction.total_s, prediction.prefill_worker, prediction.decode_worker


def _first(best: Prediction | None, compared: list[Prediction]) -> tuple[Prediction, ...]:
    """`best`, and others to compare it with."""
    others = [prediction for prediction in compared if prediction is not best][:MAX_RECORDED]
    return (*others,) if best is None else (best, *others)
