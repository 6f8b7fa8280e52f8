"""Special tokens as grammars see them: as tokens that no text is made of.

llguidance tokenizes what a grammar leaves no choice about. Where such a text has the name of a special token in it, it
would ask for that token, which it then refuses, since that is no text. So it is given a tokenizer whose special tokens
have names that nobody writes, and grammars that refer to them by their numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from twinpool.engine import lark

_NOBODY_WRITES = "\U0010fffe"
_IN_ANGLES = re.compile(r"<(?!0x)[^<>\s]*>")
"""An added token with such a name is a special one for llguidance, whatever its tokenizer says of it."""
_IN_LARK = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|<[^<>\s"]+>')
"""What a special token's name may be in, and such a name itself."""


class Hidden(NamedTuple):
    """The text of a tokenizer.json with other names for its special tokens, and their numbers by their own names."""

    tokenizer: str
    token_ids: Mapping[str, int]


def hide(tokenizer: str) -> Hidden:
    """Renames the special tokens in the text of a tokenizer.json, as `tokenizers` writes it.

    Raises:
        ValueError: it is none.
    """
    place = re.search(r'"added_tokens":\s*', tokenizer)
    if place is None:
        raise ValueError("it has no added_tokens")
    added, _ = json.JSONDecoder().raw_decode(tokenizer, place.end())
    token_ids = {
        token["content"]: token["id"]
        for token in added
        if token["special"] or _IN_ANGLES.fullmatch(token["content"])
    }
    if not token_ids:
        return Hidden(tokenizer, {})
    new_names = {_quoted(name): _quoted(name[:1] + _NOBODY_WRITES + name[1:]) for name in token_ids}
    any_name = re.compile("|".join(map(re.escape, new_names)))
    return Hidden(any_name.sub(lambda found: new_names[found[0]], tokenizer), token_ids)


def by_number(source: str, token_ids: Mapping[str, int]) -> str:
    """A grammar in Lark that refers to special tokens by their numbers where it did by their names."""

    def replaced(found: re.Match[str]) -> str:
        token_id = token_ids.get(found[0])
        return found[0] if token_id is None else lark.token(token_id)

    return _IN_LARK.sub(replaced, source)


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
