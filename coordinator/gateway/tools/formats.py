"""Which formats the served model's answers have: by its chat template, or as the operator says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from twinpool.answer_formats import ReasoningFormat, ToolCallFormat
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.tools.hermes import HermesFormat
from twinpool.coordinator.gateway.tools.llama3 import Llama3Format
from twinpool.coordinator.gateway.tools.mistral import ARGS, MARK, MistralFormat
from twinpool.coordinator.gateway.tools.reasoning import ThinkFormat
from twinpool.coordinator.gateway.tools.tool_format import ToolFormat
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ConfigError, InvalidRequest
from twinpool.request import Grammar

_NOT_HERMES = ("<function=", "<arg_key>")
"""Of templates that put something else than JSON between the same tags (Qwen3-Coder, GLM 4)."""
MODEL_WITH_TOOLS = "Qwen/Qwen2.5-0.5B-Instruct"
"""A small one, by the template that it comes with."""
_OR_DO_WITHOUT = 'leave tools out, or set tool_choice to "none"'


@dataclass(frozen=True)
class AnswerFormat:
    """How the model's answers are to be read. Without `tools` no calls can be, and `why_no_tools` says why.

    `special_token_ids` are the tokens that an answer's text leaves out, by their texts.
    """

    tools: ToolFormat | None
    reasoning: ThinkFormat | None
    special_token_ids: Mapping[str, int]
    why_no_tools: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: GatewayConfig) -> AnswerFormat:
        """The formats of the model with that tokenizer.

        Raises:
            ConfigError: calls are to be read of a model whose template takes no tools.
        """
        added, special = tokenizer.added_token_ids, tokenizer.special_token_ids
        template = tokenizer.tool_template
        source = "" if template is None else template.source
        takes_tools = template is not None and template.takes_tools
        sources = source + ("" if tokenizer.chat_template is None else tokenizer.chat_template.source)
        name = config.tool_calls
        if name is ToolCallFormat.AUTO:
            name = _tool_format_of(source) if takes_tools else ToolCallFormat.NONE
        elif name is not ToolCallFormat.NONE and not takes_tools:
            raise ConfigError(
                f"--tool-call-parser is {name}, but the model's chat template takes no tools, so the model would never "
                "hear of them; leave the flag out, or give the model a template that takes tools"
            )
        thinks = config.reasoning is ReasoningFormat.THINK or (
            config.reasoning is ReasoningFormat.AUTO and any(tag in sources for tag in ThinkFormat.marks)
        )
        return cls(
            tools=_tool_format(name, source, added),
            reasoning=ThinkFormat(added) if thinks else None,
            special_token_ids={text: id_ for text, id_ in added.items() if id_ in special},
            why_no_tools=_why_no_tools(takes_tools, config.tool_calls),
        )

    @cached_property
    def tokens_of_reasoning(self) -> frozenset[int]:
        """The special tokens that reasoning is marked with."""
        return self._special(self.reasoning.marks if self.reasoning else ())

    @cached_property
    def tokens_of_calls(self) -> frozenset[int]:
        """The special tokens that calls are marked with."""
        return self._special(self.tools.marks if self.tools else ())

    def need_tools(self) -> ToolFormat:
        """The format of calls. Raises InvalidRequest if there is none."""
        if self.tools is None:
            raise InvalidRequest(f"{self.why_no_tools}; {_OR_DO_WITHOUT}", param="tools")
        return self.tools

    def after_reasoning(self, grammar: Grammar, prompt: str) -> Grammar:
        """The grammar of a whole answer to `prompt` (as the chat template wrote it): `grammar`, which has been checked,
        with the reasoning that may come before."""
        return grammar if self.reasoning is None else self.reasoning.before(grammar, prompt)

    def _special(self, marks: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self.special_token_ids[text] for text in marks if text in self.special_token_ids)


def _tool_format_of(template: str) -> ToolCallFormat:
    """The format that a template writes earlier calls in."""
    if MARK in template:
        return ToolCallFormat.MISTRAL
    if "<tool_call>" in template and not any(text in template for text in _NOT_HERMES):
        return ToolCallFormat.HERMES
    if '"parameters"' in template and "ipython" in template:
        return ToolCallFormat.LLAMA3_JSON
    return ToolCallFormat.NONE


def _tool_format(name: ToolCallFormat, template: str, added: Mapping[str, int]) -> ToolFormat | None:
    match name:
        case ToolCallFormat.HERMES:
            return HermesFormat(added)
        case ToolCallFormat.LLAMA3_JSON:
            return Llama3Format(added)
        case ToolCallFormat.MISTRAL:
            before_list = " " if f"{MARK} [" in template else ""
            return MistralFormat(added, is_named=ARGS in template, before_list=before_list)
        case _:
            return None


def _why_no_tools(takes_tools: bool, flag: ToolCallFormat) -> str:
    if not takes_tools:
        return (
            "this model's chat template takes no tools, so the model would not know of them; "
            f"the operator can serve one that was made for tools, like {MODEL_WITH_TOOLS} (docs/tools.md)"
        )
    if flag is ToolCallFormat.NONE:
        return "this server reads no calls of tools (--tool-call-parser none)"
    return (
        "this model writes calls of tools in a way that this server does not read "
        "(--tool-call-parser names those that it does)"
    )
