"""Small tokenizers with each kind of decoder that language models use."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models

from twinpool.engine.tokenizer import Tokenizer

_PIECES = ["▁", "▁a", "a", "b", "▁the", "é", "日", "▁日本", "\ufffd", "▁\ufffd", "  ", "##ing", "ing", "."]


def _tokenizer(pieces: list[str], decoder: object) -> Tokenizer:
    backend = tokenizers.Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0])
    )
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<tool>"])
    return Tokenizer(backend, eos_token_ids=(), chat_template=None)


def sentencepiece() -> Tokenizer:
    """Llama 2's decoder: spaces as ▁, unknown characters as byte tokens, the first space dropped."""
    pieces = [*_PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _tokenizer(pieces, decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    """T5's decoder."""
    return _tokenizer(_PIECES, decoders.Metaspace())


def wordpiece() -> Tokenizer:
    """BERT's decoder."""
    return _tokenizer(_PIECES, decoders.WordPiece())
