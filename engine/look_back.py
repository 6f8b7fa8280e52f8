"""What sampling knows of a sequence's earlier tokens, where its parameters look back at them."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.request import Job


@dataclass(slots=True, eq=False)
class LookBack:
    """One sequence's past, from its job's tokens on: a core makes it and passes it along with every slice, and only the
    step thread looks inside. A new attempt has a new one, made of the tokens that the client has by then: nothing of
    it ever travels.

    `past` is what `engine/past.py` keeps in it from the first slice on, opaque because cores load no numpy.
    """

    job: Job
    past: object | None = None

    @classmethod
    def of(cls, job: Job) -> LookBack | None:
        """A new one, or None if the job's sampling needs none."""
        return cls(job) if job.sampling.looks_back else None
