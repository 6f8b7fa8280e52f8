"""Reading answers with calls and reasoning, and models whose templates know tools, in miniature."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twinpool.config import GatewayConfig
from twinpool.coordinator.gateway.deltas import (
    Content,
    Delta,
    DeltaParser,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from twinpool.coordinator.gateway.tools import AnswerFormat
from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer

EOS = "</s>"
_PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"

# As the models' own templates write calls, space for space, and little else of them.
QWEN = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK_R1 = _PLAIN + "{% if add_generation_prompt %}<think>\n{% endif %}"
LLAMA = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools is not none %}Environment: ipython\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ {'output': m.content} | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL_ID = (
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}" + _MISTRAL_ID + ""
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_NAMED = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{% for call in m.tool_calls %}" + _MISTRAL_ID + ""
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}"
)
QWEN_CODER = (
    _TOOLS + "{% if tools %}<tool_call>\n<function=example>\n</function>\n</tool_call>{% endif %}" + _PLAIN
)


def tokenizer_of(template: str | None, added: Sequence[str] = (), special: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of single bytes and the `added` and `special` tokens, of which `EOS` is the last."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False) for text in added])
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*special, EOS)])
    eos = backend.token_to_id(EOS)
    assert eos is not None
    return Tokenizer(
        backend, (eos,), None if template is None else ChatTemplate(template, {"eos_token": EOS})
    )


def answers_of(
    template: str | None, added: Sequence[str] = (), special: Sequence[str] = (), **config: object
) -> AnswerFormat:
    """The formats of a model with that template and those tokens, as `serve` with these flags has them."""
    return AnswerFormat.of(tokenizer_of(template, added, special), replace(GatewayConfig(), **config))  # type: ignore[arg-type]


def ids() -> Callable[[], str]:
    """Makes the ids id0, id1, …"""
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def read(parser: DeltaParser, *pieces: str) -> list[Delta]:
    """What the parser makes of an answer in those pieces; what belongs together is joined."""
    deltas = [delta for piece in pieces for delta in parser.add(piece)]
    return joined([*deltas, *parser.finish()])


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """With adjacent deltas of one kind as one."""
    whole: list[Delta] = []
    for delta in deltas:
        last = whole[-1] if whole else None
        match delta, last:
            case (Content(text), Content(before)) | (Reasoning(text), Reasoning(before)):
                whole[-1] = replace(delta, text=before + text)
            case ToolCallArguments(index, text), ToolCallArguments(same, before) if index == same:
                whole[-1] = replace(delta, text=before + text)
            case _:
                whole.append(delta)
    return whole


def call(index: int, name: str, arguments: str) -> list[Delta]:
    """The deltas of a call, with the id that `ids` gives it."""
    whole: list[Delta] = [ToolCallBegin(index, f"id{index}", name)]
    return [*whole, ToolCallArguments(index, arguments)] if arguments else whole
