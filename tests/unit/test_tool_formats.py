"""Which format a model's answers are read in: by its chat template, or as the operator says."""

from __future__ import annotations

import argparse

import pytest
from support.tool_answers import (
    DEEPSEEK_R1,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN,
    QWEN_CODER,
    answers_of,
    tokenizer_of,
)

from twinpool.answer_formats import ReasoningFormat, ToolCallFormat
from twinpool.commands.gateway_flags import add_gateway_flags, gateway_config
from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.tools import AnswerFormat
from twinpool.coordinator.gateway.tools.hermes import HermesFormat
from twinpool.coordinator.gateway.tools.llama3 import Llama3Format
from twinpool.coordinator.gateway.tools.mistral import MistralFormat
from twinpool.coordinator.gateway.tools.tool_format import ToolFormat
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ConfigError, InvalidRequest

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "thinks"),
    [
        (QWEN, HermesFormat, True),
        (DEEPSEEK_R1, None, True),
        (LLAMA, Llama3Format, False),
        (MISTRAL, MistralFormat, False),
        (MISTRAL_NAMED, MistralFormat, False),
        (QWEN_CODER, None, False),
        (PLAIN, None, False),
        (None, None, False),
    ],
)
def test_a_chat_template_shows_how_calls_and_reasoning_are_written(
    template: str | None, tools: type[ToolFormat] | None, thinks: bool
) -> None:
    answers = answers_of(template)
    assert type(answers.tools) is (tools or type(None))
    assert (answers.reasoning is not None) == thinks


@pytest.mark.parametrize(
    ("source", "takes_tools"),
    [
        ("{% if tools %}x{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% macro all() %}{% for t in tools %}{{ t }}{% endfor %}{% endmacro %}{{ all() }}", True),
        ("{# tools #}{{ messages }}", False),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        ("{{ message.tools }}", False),
    ],
)
def test_a_template_takes_tools_if_it_looks_at_them(source: str, takes_tools: bool) -> None:
    assert ChatTemplate(source, {}).takes_tools == takes_tools


def test_the_operator_may_name_the_formats_or_switch_them_off() -> None:
    answers = answers_of(QWEN, tool_calls=ToolCallFormat.LLAMA3_JSON, reasoning=ReasoningFormat.NONE)
    assert type(answers.tools) is Llama3Format
    assert answers.reasoning is None
    answers = answers_of(PLAIN, tool_calls=ToolCallFormat.NONE, reasoning=ReasoningFormat.THINK)
    assert answers.tools is None
    assert answers.reasoning is not None


def test_a_template_of_its_own_for_tools_is_the_one_that_counts() -> None:
    backend, eos = tokenizer_of(PLAIN).backend, tokenizer_of(PLAIN).eos_token_ids
    tokenizer = Tokenizer(backend, eos, ChatTemplate(PLAIN, {}), ChatTemplate(QWEN, {}))
    answers = AnswerFormat.of(tokenizer, GatewayConfig())
    assert type(answers.tools) is HermesFormat
    assert answers.reasoning is not None
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == "Hi"
    assert "<|im_start|>user\nHi" in tokenizer.apply_chat_template(messages, tools=[])


def test_a_format_of_calls_is_refused_for_a_model_that_never_hears_of_tools() -> None:
    for template in (PLAIN, None):
        with pytest.raises(
            ConfigError, match="--tool-call-parser is hermes, but the model's chat template takes no"
        ):
            answers_of(template, tool_calls=ToolCallFormat.HERMES)


@pytest.mark.parametrize(
    ("template", "flag", "reason"),
    [
        (PLAIN, ToolCallFormat.AUTO, "chat template takes no tools"),
        (
            PLAIN,
            ToolCallFormat.AUTO,
            r"one that was made for tools, like Qwen/Qwen2\.5-0\.5B-Instruct \(docs/tools\.md",
        ),
        (QWEN, ToolCallFormat.NONE, "reads no calls of tools"),
        (QWEN_CODER, ToolCallFormat.AUTO, "in a way that this server does not read"),
    ],
)
def test_where_tools_cannot_be_the_refusal_says_why(template: str, flag: ToolCallFormat, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        answers_of(template, tool_calls=flag).need_tools()
    assert refused.value.param == "tools"
    assert 'set tool_choice to "none"' in refused.value.message


def test_marks_that_are_special_tokens_must_be_shown_and_others_are_text_anyway() -> None:
    special = ("[TOOL_CALLS]", "[ARGS]", "[INST]")
    answers = answers_of(MISTRAL_NAMED, special=special)
    assert answers.tokens_of_calls == {answers.special_token_ids[text] for text in special[:2]}
    assert answers_of(LLAMA, special=("<|python_tag|>",)).tokens_of_calls == frozenset()
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert answers_of(QWEN, added=marks).tokens_of_calls == frozenset()
    answers = answers_of(QWEN, special=marks)
    assert len(answers.tokens_of_calls) == len(answers.tokens_of_reasoning) == 2


def test_ids_of_calls_are_as_the_models_template_takes_them() -> None:
    hermes, mistral = answers_of(QWEN).need_tools(), answers_of(MISTRAL).need_tools()
    made = {hermes.make_id() for _ in range(100)}
    assert len(made) == 100
    assert all(id_.startswith("call_") and len(id_) == 29 and id_[5:].isalnum() for id_ in made)
    assert all(len(id_) == 9 and id_.isalnum() for id_ in (mistral.make_id() for _ in range(100)))
    assert hermes.id_for_template("call_123") == "call_123"
    assert mistral.id_for_template("call_abcDEF-123456") == "DEF123456"


def test_flags_of_serve_name_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_gateway_flags(parser)
    default = gateway_config(parser.parse_args([]))
    assert (default.tool_calls, default.reasoning) == (ToolCallFormat.AUTO, ReasoningFormat.AUTO)
    given = gateway_config(parser.parse_args(["--tool-call-parser", "mistral", "--reasoning-parser", "none"]))
    assert (given.tool_calls, given.reasoning) == (ToolCallFormat.MISTRAL, ReasoningFormat.NONE)
    with pytest.raises(SystemExit):
        parser.parse_args(["--tool-call-parser", "xml"])
    assert "allowed: auto, none, hermes, llama3_json, mistral" in capsys.readouterr().err
