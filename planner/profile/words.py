"""A profile for people: tables of what was found, and of how well it fits."""

from __future__ import annotations

from rich.table import Table

from twinpool.planner.profile.fitted_times import FittedTimes
from twinpool.planner.profile.saved import Profile
from twinpool.planner.step_shape import of_chunk, of_sequences

_STEPS = (
    ("1 sequence of 256", of_sequences([256])),
    ("8 sequences of 256", of_sequences([256] * 8)),
    ("32 sequences of 256", of_sequences([256] * 32)),
    ("a prompt of 128", of_chunk(128)),
    ("a prompt of 512", of_chunk(512)),
    ("128 tokens after 512", of_chunk(128, 512)),
)


def model_table(profile: Profile) -> Table:
    """What the model says of some steps and of everything beside them."""
    times = FittedTimes(profile)
    table = Table(title=times.name, title_justify="left")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_column("beside a busy neighbour, ms", justify="right")
    for name, shape in _STEPS:
        table.add_row(name, _ms(times.step_s(shape)), _ms(times.step_s(shape, 1)))
    for fit in profile.transfers:
        moved = f"KV of 512 tokens by {fit.transport}"
        table.add_row(moved, _ms(fit.start_s + fit.byte_s * 512 * profile.kv_token_bytes), "")
    over = profile.overheads
    table.add_row(
        "a step after nothing to do takes longer by", _ms(over.wake_s), _ms(over.wake_s + over.busy_wake_s)
    )
    for name, seconds in (
        ("a request until it is queued", over.request_s),
        ("  and for each 1,000 tokens of its prompt", 1000 * over.prompt_token_s),
        ("a message between two processes", over.control_s),
        ("a token from a step's end to the client", over.output_s),
        ("a hand-over beside its bytes", over.handoff_s),
        ("between two steps, and while others have its cores", profile.served.step_s),
        ("  and for each sequence", profile.served.sequence_s),
        ("  and for each chunk of a prompt", profile.served.chunk_s),
        ("  which beside a neighbour is more by", profile.served.beside_chunk_s),
        ("a prefill worker's step, for each that a neighbour ends meanwhile", over.delivery_s),
        ("  and for each sequence of that", over.delivery_token_s),
    ):
        table.add_row(name, _ms(seconds), "")
    return table


def residual_table(profile: Profile) -> Table:
    """How far the model is from what was measured."""
    table = Table(title="predicted ÷ measured − 1", title_justify="left")
    table.add_column("part")
    for name in ("points", "median", "p90", "worst", "bias"):
        table.add_column(name, justify="right")
    table.add_column("the worst")
    for each in profile.residuals:
        table.add_row(
            each.part,
            str(each.num_points),
            f"{each.median:.1%}",
            f"{each.p90:.1%}",
            f"{each.worst:.1%}",
            f"{each.bias:+.1%}",
            each.worst_case,
        )
    return table


def _ms(seconds: float) -> str:
    if seconds < 1e-6:
        return "< 0.001"
    return f"{1e3 * seconds:.3f}" if seconds < 1e-3 else f"{1e3 * seconds:.2f}"
