"""What a request's tools mean for its prompt, its tokens and its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from twinpool.bounds import MOST_GRAMMAR_CHARS
from twinpool.coordinator.gateway.body_errors import shown
from twinpool.coordinator.gateway.deltas import DeltaParser, MakeParser, PlainText
from twinpool.coordinator.gateway.tools.fields import FunctionDefinition, NamedToolChoice, Tool, ToolChoice
from twinpool.coordinator.gateway.tools.formats import AnswerFormat
from twinpool.coordinator.gateway.tools.tool_format import ToolFormat
from twinpool.errors import InvalidRequest
from twinpool.request import Grammar, GrammarKind

TOOL_CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request is served, as far as tools and reasoning go.

    `template_tools` go to the chat template. `grammar` is what an answer must be that must call a tool: it is still to
    be checked, like any that clients have a part in, and then to be put behind the reasoning
    (`AnswerFormat.after_reasoning`). `shown_token_ids` are special tokens that must be part of the answer's text,
    because `parser_after` reads them.
    """

    answers: AnswerFormat
    template_tools: list[dict[str, Any]] | None = None
    grammar: Grammar | None = None
    tool_names: frozenset[str] = frozenset()
    most_calls: int | None = None

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """The special tokens that the parser needs to see."""
        calls = self.answers.tokens_of_calls if self.tool_names else frozenset[int]()
        return self.answers.tokens_of_reasoning | calls

    def parser_after(self, prompt: str) -> MakeParser:
        """Makes parsers of answers to `prompt`; `PlainText` itself if there is nothing to read but text."""
        answers, names, most_calls = self.answers, self.tool_names, self.most_calls
        calls, thoughts = answers.tools if names else None, answers.reasoning
        if calls is None and thoughts is None:
            return PlainText

        def make() -> DeltaParser:
            parser: DeltaParser = PlainText() if calls is None else calls.parser(names, most_calls)
            return parser if thoughts is None else thoughts.parser(prompt, parser)

        return make


def plan(
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice | None,
    parallel_tool_calls: bool | None,
    answers: AnswerFormat,
) -> ToolPlan:
    """What the request's three fields ask of a model whose answers are `answers`.

    With the choice "none" it is as if there were no tools: the model does not hear of them. With "required", or a
    function's name, the answer consists of calls whose arguments follow the functions' schemas; otherwise the model
    says what it likes. `parallel_tool_calls` false leaves out calls behind the first.

    Raises:
        InvalidRequest: a tool or the choice is wrong, or the model cannot have tools.
    """
    functions = [_function(number, tool) for number, tool in enumerate(tools or ())]
    _check_names(functions)
    chosen = _chosen(tool_choice, functions)
    if not functions or tool_choice == "none":
        return ToolPlan(answers)
    format_ = answers.need_tools()
    is_single = parallel_tool_calls is False or isinstance(tool_choice, NamedToolChoice)
    return ToolPlan(
        answers,
        template_tools=[_for_template(function) for function in functions],
        grammar=_grammar(format_, chosen, is_single) if chosen else None,
        tool_names=frozenset(function.name for function in functions),
        most_calls=1 if parallel_tool_calls is False else None,
    )


def _function(number: int, tool: Tool) -> FunctionDefinition:
    where = f"tools[{number}]"
    if tool.type != "function":
        message = f'{where}.type is {shown(tool.type)}; only tools of the type "function" are supported'
        raise InvalidRequest(message, param=f"{where}.type")
    function = tool.function
    if function is None:
        message = f"{where}.function is missing; it says what can be called"
        raise InvalidRequest(message, param=f"{where}.function")
    if not _NAME.fullmatch(function.name):
        raise InvalidRequest(
            f"{where}.function.name is a string of {len(function.name)} characters; it must be 1 to 64 letters, "
            "digits, - and _",
            param=f"{where}.function.name",
        )
    _check_schema(f"{where}.function.parameters", function.parameters)
    return function


def _check_schema(where: str, schema: dict[str, Any] | None) -> None:
    """Raises InvalidRequest unless `schema` can be one of an object. What else may be wrong with it shows where it is
    made a grammar."""
    if schema is None:
        return
    problem = ""
    if schema.get("type", "object") not in ("object", ["object"]):
        problem = 'has another type than "object"'
    elif not isinstance(schema.get("properties", {}), dict):
        problem = "has properties that are no object"
    elif not isinstance(schema.get("required", []), list):
        problem = "has a required that is no list"
    if problem:
        message = f"{where} {problem}; it must be the JSON schema of an object"
        raise InvalidRequest(message, param=where)


def _check_names(functions: Sequence[FunctionDefinition]) -> None:
    first: dict[str, int] = {}
    for number, function in enumerate(functions):
        if (before := first.setdefault(function.name, number)) != number:
            raise InvalidRequest(
                f"tools[{number}] has the same name as tools[{before}]; give each function a name of its own",
                param=f"tools[{number}].function.name",
            )


def _chosen(choice: ToolChoice | None, functions: Sequence[FunctionDefinition]) -> list[FunctionDefinition]:
    """The functions one of which the answer must call; none if it need not."""
    match choice:
        case None | "none" | "auto":
            return []
        case str() if choice not in TOOL_CHOICES:
            allowed = ", ".join(f'"{name}"' for name in TOOL_CHOICES)
            problem = f'it must be {allowed} or {{"type": "function", "function": {{"name": …}}}}'
            raise InvalidRequest(f"tool_choice is {shown(choice)}; {problem}", param="tool_choice")
        case NamedToolChoice(type=kind) if kind != "function":
            message = f'tool_choice.type is {shown(kind)}; it must be "function"'
            raise InvalidRequest(message, param="tool_choice.type")
        case NamedToolChoice(function=None):
            message = "tool_choice.function is missing; it says which function to call"
            raise InvalidRequest(message, param="tool_choice.function")
    if not functions:
        message = (
            "tool_choice says that a tool must be called, but there are no tools; send tools or leave it out"
        )
        raise InvalidRequest(message, param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function is not None:
        named = [function for function in functions if function.name == choice.function.name]
        if not named:
            message = f"tool_choice names {shown(choice.function.name)}, which is none of the tools; name one of them"
            raise InvalidRequest(message, param="tool_choice.function.name")
        return named
    return list(functions)


def _grammar(format_: ToolFormat, functions: Sequence[FunctionDefinition], is_single: bool) -> Grammar:
    source = format_.grammar(functions, is_single=is_single)
    if len(source) > MOST_GRAMMAR_CHARS:
        message = (
            f"the functions' schemas have {len(source)} characters together, and an answer can be held to at most "
            f'{MOST_GRAMMAR_CHARS}; send fewer tools, name one of them as tool_choice, or set it to "auto"'
        )
        raise InvalidRequest(message, param="tools")
    return Grammar(GrammarKind.LARK, source)


def _for_template(function: FunctionDefinition) -> dict[str, Any]:
    """The tool as OpenAI has it, without what is not given, and without what is for the server only."""
    fields = msgspec.to_builtins(function)
    given = {name: value for name, value in fields.items() if value is not None and name != "strict"}
    return {"type": "function", "function": given}
