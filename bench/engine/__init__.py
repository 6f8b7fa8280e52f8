"""`twinpool bench engine`: what each part of the engine takes, beside what this machine's limits allow, in one run."""

GROUPS = (
    "prefill",
    "decode",
    "attention",
    "kv",
    "linear",
    "elementwise",
    "sampling",
    "transfer",
    "push",
    "coordinator",
    "start",
)
"""What can be measured, in the order of a run."""
CEILINGS = "ceilings"
"""What is measured in any case; chosen alone, it alone."""
