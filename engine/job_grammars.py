"""What the grammars of jobs need of a model. Their library, which is not everywhere where engines run, is loaded at the
first of them, or while nobody waits for anything."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from twinpool.engine.past import Matcher
from twinpool.request import Job, RequestKey

if TYPE_CHECKING:
    from twinpool.engine.grammars import Grammars


class JobGrammars:
    """Those of one worker's jobs. Any thread may use it."""

    def __init__(self, directory: Path, num_logits: int) -> None:
        """For the model in `directory`, which gives `num_logits` logits."""
        self._directory = directory
        self._num_logits = num_logits
        self._grammars: Grammars | None = None
        self._making = Lock()

    def prepare(self, job: Job) -> None:
        """Compiles what the job's answer is to match, if anything, so that its first step need not: on the calling
        thread, any but that of the steps.

        Raises:
            TwinpoolError: it cannot be compiled. Its steps say so, too.
        """
        if job.sampling.grammar is not None:
            self._of_model().prepare(job)

    def forget(self, key: RequestKey) -> None:
        """Gives up what was prepared for that job, if its steps have not come for it."""
        if self._grammars is not None:
            self._grammars.forget(key)

    def get_ahead(self) -> bool:
        """Does a piece of what the first grammar would wait for; returns whether all is done. Python's other threads
        may stand still in it.

        Raises:
            ModelError: no grammar can be followed with this model.
        """
        return self._of_model().get_ahead()

    def matcher(self, job: Job) -> Matcher:
        """A new matcher of the job's grammar, at its beginning; compiles that if nobody has.

        Raises:
            TwinpoolError: it cannot be compiled.
        """
        return self._of_model().matcher(job)

    def _of_model(self) -> Grammars:
        with self._making:
            if self._grammars is None:
                from twinpool.engine.grammars import Grammars

                self._grammars = Grammars.of_model(self._directory, self._num_logits)
            return self._grammars
