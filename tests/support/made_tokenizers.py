"""Small trained tokenizers of the kinds that language models use, for tests that make prompts."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = tuple(
    a + b + c
    for a, b, c in product(("ba", "ke", "lo", "mi", "tu"), ("n", "r", "st"), ("a", "e", "i", "o", "us"))
)
_SPECIAL = ["<unk>", "<s>", "</s>"]


def _corpus(num_words: int = 4000) -> list[str]:
    """Short lines, so that every word also begins some."""
    row = random.Random(0).choices(WORDS, k=num_words)
    return [" ".join(row[start : start + 4]) for start in range(0, num_words, 4)]


def _around(tokenizer: tokenizers.Tokenizer, before: str = "", after: str = "") -> tokenizers.Tokenizer:
    """With special tokens around every text."""
    template = " ".join(part for part in (before, "$A", after) if part)
    tokens = [(name, tokenizer.token_to_id(name)) for name in (before, after) if name]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
    return tokenizer


@cache
def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: no special tokens, spaces belong to the word behind."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(_corpus(), trainer)
    return made


@cache
def metaspace() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: a space before the text, and <s>."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=_SPECIAL, show_progress=False)
    made.train_from_iterator(_corpus(), trainer)
    return _around(made, before="<s>")


@cache
def unigram() -> tokenizers.Tokenizer:
    """As T5: </s> behind the text."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(_corpus(), trainer)
    return _around(made, after="</s>")


@cache
def wordpiece() -> tokenizers.Tokenizer:
    """As BERT: special tokens on both sides."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=_SPECIAL, show_progress=False)
    made.train_from_iterator(_corpus(), trainer)
    return _around(made, before="<s>", after="</s>")


@cache
def bytes_only() -> tokenizers.Tokenizer:
    """As ByT5: a token is a byte, so there are no words, only letters."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([], trainer)
    return made


@cache
def joining() -> tokenizers.Tokenizer:
    """Of no use: the whole text is one token, known or not."""
    return tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))


ALL = {
    "byte level": byte_level,
    "metaspace": metaspace,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "bytes": bytes_only,
}
"""Those that prompts can be made with."""
