"""Text to token ids and back, and chat templates: as transformers' AutoTokenizer, without importing it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from twinpool.engine import convert
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.model_cache import cached
from twinpool.engine.model_config import ModelConfig
from twinpool.errors import InvalidRequest, ModelError

_SPECIAL_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
"""Names of chat templates, as transformers has them."""
_CONVERSION_BYTES = 100_000_000
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TokenAlone(NamedTuple):
    """What a token is without its neighbours: whether it is one byte of a character (``<0xE2>``), and how many
    characters the text of it alone has."""

    is_byte: bool
    num_chars: int


class Tokenizer:
    """A model's tokenizer. Immutable after construction; any thread may use it.

    `eos_token_ids` are the tokens that end an answer by the model's own files, `special_token_ids` those that
    plain text leaves out. `added_token_ids` are those with a text of their own (special or not), by that text.
    `chat_template` is None if the model has none; `tool_template`, for conversations with tools, is the same unless the
    model has another. `vocab_size` counts all tokens including added ones. `file` is the tokenizer.json that it was
    read from, if it was. With `has_byte_fallback` a character outside the vocabulary is a run of byte tokens like
    ``<0xE2>``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
        file: Path | None = None,
    ) -> None:
        self.backend = backend
        self.file = file
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.added_token_ids: dict[str, int] = {token.content: id_ for id_, token in added.items()}
        self.has_byte_fallback = (
            backend.decoder is not None and b"ByteFallback" in backend.decoder.__getstate__()
        )
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self._alone: dict[int, TokenAlone] = {}

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads the tokenizer of the model directory `path`; one without a tokenizer.json is converted once.

        Raises:
            ModelError: there is no tokenizer, or its files cannot be read.
        """
        directory = Path(path)
        source = directory if (directory / "tokenizer.json").is_file() else _converted(directory)
        file = source / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as exc:  # tokenizers raises nothing more specific
            raise ModelError(f"{file} is no tokenizer: {exc}") from exc
        backend.no_truncation()
        backend.no_padding()
        settings = _read_json(source / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(source / "special_tokens_map.json") | settings)
        templates = {
            name: ChatTemplate(text, special_tokens) for name, text in _templates(source, settings).items()
        }
        eos_token_ids = ModelConfig.from_dir(directory).eos_token_ids
        if (
            not eos_token_ids
            and (eos := backend.token_to_id(special_tokens.get("eos_token", ""))) is not None
        ):
            eos_token_ids = (eos,)
        return cls(backend, eos_token_ids, templates.get(_DEFAULT), templates.get(_FOR_TOOLS), file.resolve())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such.

        `add_special_tokens` adds what the model expects around a plain text (BOS). A rendered chat has it
        already.
        """
        # The batch call, unlike `encode`, lets other threads run meanwhile; "fast" leaves out character offsets.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids outside the vocabulary have none."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def alone(self, token_id: int) -> TokenAlone | None:
        """What that token is by itself; None if the vocabulary has no such id."""
        if (found := self._alone.get(token_id)) is None and (
            token := self.backend.id_to_token(token_id)
        ) is not None:
            is_byte = self.has_byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None
            num_chars = len(self.decode((token_id,), skip_special_tokens=False))
            found = self._alone[token_id] = TokenAlone(is_byte, num_chars)
        return found

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters is no fewer than n / this many tokens, unless
        the tokenizer drops some.
        """
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as one text; encode it without adding special tokens, it has them.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses these messages.
        """
        template = self.chat_template if kwargs.get("tools") is None else self.tool_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; send a prompt to /v1/completions instead", param="messages"
            )
        return template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


def _converted(directory: Path) -> Path:
    """The cache's fast form of the tokenizer in `directory`."""
    files = sorted([*directory.glob("tokenizer*"), *(directory / name for name in _VOCABULARY_FILES)])
    digest = hashlib.sha256()
    for file in dict.fromkeys(files):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelError(f"{directory} has no tokenizer.json; copy the model's tokenizer files there")
    key = f"tokenizer-{digest.hexdigest()[:32]}-v{convert.CONVERTER_VERSION}"
    return cached(
        key, _CONVERSION_BYTES, lambda target: convert.run("tokenizer", directory.resolve(), target)
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ModelError(f"{path} is no JSON: {exc}") from exc
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; each is a string, or an object with its text as "content"."""
    values = {name: settings.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates that are of use, by their names: of chat_template.jinja and the folder beside it, else of
    tokenizer_config.json, which has a text, or a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        files = {_DEFAULT: file, _FOR_TOOLS: directory / "additional_chat_templates" / f"{_FOR_TOOLS}.jinja"}
        return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    given = settings.get("chat_template")
    if isinstance(given, list):
        named = {entry["name"]: entry["template"] for entry in given}
        return {name: named[name] for name in (_DEFAULT, _FOR_TOOLS) if name in named}
    return {_DEFAULT: given} if given else {}
