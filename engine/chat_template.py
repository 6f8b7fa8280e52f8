"""Renders a model's chat template to the same text as transformers, without importing it.

Templates come from strangers: they run in Jinja's immutable sandbox and see plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinpool.errors import InvalidRequest, ModelError

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_NOT_RENDERED = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,  # tools or arguments that are nested too deeply
)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; what it encloses is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own signature

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` (bos_token, eos_token, …) are visible to it by name.

    `source` is its text; it `takes_tools` if it looks at what tools a request offers.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError if `source` is no valid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ModelError(
                f"the model's chat template is wrong at line {exc.lineno}: {exc.message}"
            ) from exc
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as one text, special tokens included.

        `kwargs` (tools, documents, enable_thinking, …) go to the template.

        Raises:
            InvalidRequest: the template refuses these messages, or cannot be rendered with them.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **kwargs}
        plain = [_plain_message(message) for message in messages]
        try:
            return self._template.render(
                messages=plain, add_generation_prompt=add_generation_prompt, **variables
            )
        except _NOT_RENDERED as exc:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {exc}", param="messages"
            ) from exc


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that are null (templates would print "None"), and reasoning under all its names."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
