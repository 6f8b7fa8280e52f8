"""How long and how large values on a wire may be. Decoding refuses what is beyond (`messages.decode`).

The bounds are far above what a server can be configured to, yet low enough that no message makes a process compute or
remember without limit. Names and numbers within bounds can still make no sense; the cores find that out.
"""

from __future__ import annotations

from typing import Annotated, Any

try:
    from msgspec import Meta
except ModuleNotFoundError:  # where the engine runs alone, nothing comes over a wire

    def Meta(**bound: Any) -> Any:  # type: ignore[no-redef]  # noqa: N802
        """The bound, for readers."""
        return bound


MOST = 2**31 - 1
"""Tokens, blocks, and whatever else is counted one by one."""
MOST_BYTES = 2**63 - 1
MOST_IDS = 1 << 24
MOST_PEERS = 4096
MOST_JOBS = 1 << 20
MOST_LOGPROBS = 20
"""Likeliest tokens whose log probabilities are told beside the chosen one's, as in OpenAI's API."""
MOST_PROMPT_LOGPROBS = 1 << 18
"""Log probabilities of one prompt's tokens and of the likeliest at each place. They are one message, of some 4 MB, and
while it is read (0.1 s) no other is."""
MOST_BIAS = 100
MOST_BIASES = 1024
"""Token ids to whose logits something is added."""
MOST_GRAMMAR_CHARS = 1 << 18
MOST_ALLOWED_IDS = 1 << 14
MOST_BAD_WORDS = 1024
"""As a client writes them; each is up to two sequences of tokens."""
MOST_BAD_WORD_TOKENS = 64
LEAST_LOGPROB = -9999.0
"""What minus infinity is told as, which JSON has no word for; as in vLLM."""

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
"""Of a worker, a process, a server: what can be part of a file's name."""
Label = Annotated[str, Meta(max_length=256)]
"""Of a host, a model, an endpoint, a transport, a metric."""
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 14)]
"""A reason, for people."""
Address = Annotated[bytes, Meta(min_length=1, max_length=1 << 17)]
Salt = Annotated[str, Meta(max_length=1 << 12)]

Count = Annotated[int, Meta(ge=0, le=MOST)]
Size = Annotated[int, Meta(ge=1, le=MOST)]
ByteCount = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Fence = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Bits64 = Annotated[int, Meta(ge=0)]
"""A digest, a seed: MessagePack itself ends at 64 bits."""
Dimension = Annotated[int, Meta(ge=1, le=1 << 16)]

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Finite, as all numbers here are."""
TransferSeconds = Annotated[float, Meta(ge=0, le=3600)]
"""A receiver waits that much longer for bytes that took so long to send."""
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=1e6)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Factor = Annotated[float, Meta(gt=0, le=1e6)]
Bias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
Logprob = Annotated[float, Meta(ge=LEAST_LOGPROB, le=0)]
TopLogprobs = Annotated[tuple[tuple[Count, Logprob], ...], Meta(max_length=MOST_LOGPROBS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
GrammarSource = Annotated[str, Meta(min_length=1, max_length=MOST_GRAMMAR_CHARS)]

TokenIds = Annotated[tuple[Count, ...], Meta(max_length=MOST_IDS)]
TokenSequences = Annotated[
    tuple[Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MOST_BAD_WORD_TOKENS)], ...],
    Meta(max_length=2 * MOST_BAD_WORDS),
]
Biases = Annotated[tuple[tuple[Count, Bias], ...], Meta(max_length=MOST_BIASES)]
BlockIds = Annotated[tuple[Count, ...], Meta(max_length=MOST_IDS)]
Digests = Annotated[tuple[Bits64, ...], Meta(max_length=MOST_IDS)]
Fences = Annotated[tuple[Fence, ...], Meta(max_length=MOST_JOBS)]
