"""Single tokens as clients see them: the text of each by itself, and its bytes."""

from __future__ import annotations

from functools import lru_cache

from twinpool.engine.tokenizer import Tokenizer

REMEMBERED_TOKENS = 1 << 16
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Texts and bytes of one tokenizer's tokens; those that were asked for lately are remembered.

    A token's text is what it adds behind another one, with its leading space. One that is part of a character has
    U+FFFD for its text. Its bytes are exact where the tokenizer works on bytes: as byte-level BPE does, or by byte
    tokens (``<0xE2>``).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(REMEMBERED_TOKENS)(self._text)
        self.bytes = lru_cache(REMEMBERED_TOKENS)(self._bytes)

    def _text(self, token_id: int) -> str:
        alone = self.tokenizer.decode((token_id,), skip_special_tokens=False)
        if _REPLACEMENT in alone:
            return alone
        # Decoders drop the space that a text begins with: behind itself the token has it.
        twice = self.tokenizer.decode((token_id, token_id), skip_special_tokens=False)
        return twice[len(alone) :]

    def _bytes(self, token_id: int) -> list[int]:
        text = self.text(token_id)
        if _REPLACEMENT in text:
            token = self.tokenizer.backend.id_to_token(token_id) or ""
            alone = self.tokenizer.alone(token_id)
            if alone is not None and alone.is_byte:
                return [int(token[1:-1], 16)]
            if all(char in _BYTE_OF for char in token):
                return [_BYTE_OF[char] for char in token]
        return list(text.encode())


def _byte_level_alphabet() -> dict[str, int]:
    """Which byte each character of byte-level BPE stands for: printable ones for themselves, the others for those from
    U+0100 on (GPT-2's table, which every tokenizer of that kind uses)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
