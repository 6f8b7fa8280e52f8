"""The built-in model with a chat template that takes tools, as many models have one: its own does not."""

from __future__ import annotations

from pathlib import Path

from support.default_model import default_model_dir

TEMPLATE = r"""
{%- if tools %}
{{- '<|im_start|>system\nYou can call these functions:\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}
{{- 'To call one, answer with its name and arguments as JSON, like:\n<tool_call>\n{"name": "add", "arguments": ' }}
{{- '{"a": 1}}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' and not tools %}
{{- '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\n<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".lstrip("\n")


def tool_model(directory: Path) -> Path:
    """Fills `directory` with the built-in model's files (by links) and this template; returns it. Skips the test if the
    model is not there. Conversations without tools are the same text as with the model's own template."""
    for file in default_model_dir().iterdir():
        if file.name != "chat_template.jinja":
            (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
