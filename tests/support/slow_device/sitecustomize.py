"""A slow device: each step of a worker takes SLOW_STEP_S seconds longer, in which it needs no processor.

Python imports this file by itself where its folder is in PYTHONPATH.
"""

import os
import sys
import time

if sys.orig_argv[1:4] == ["-m", "twinpool", "worker"]:
    from twinpool.engine.model_runner import ModelRunner

    _run = ModelRunner.run

    def _run_slowly(self, batch, on_layer_done=None):  # type: ignore[no-untyped-def]
        output = _run(self, batch, on_layer_done)
        time.sleep(float(os.environ["SLOW_STEP_S"]))
        return output

    ModelRunner.run = _run_slowly  # type: ignore[method-assign]
