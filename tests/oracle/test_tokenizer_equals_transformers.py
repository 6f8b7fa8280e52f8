"""Token ids, texts and rendered chats are those of transformers' AutoTokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.default_model import default_model_dir

from twinpool.engine.tokenizer import Tokenizer

TEXTS = (
    "",
    " ",
    "The capital of France is Paris.",
    "  two leading spaces, one trailing ",
    "\n\n\tdef f(x: int) -> int:\n\t    return x ** 2  # größer\r\n",
    "Zażółć gęślą jaźń — naïve façade, Ελληνικά, Русский, العربية, हिन्दी",
    "日本語のテキストと中文，한국어도",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 e\u0301 \u200b\ufeff",
    "1234567890 3.14159 0x1F600 1e-9",
    "<|im_start|>user\nspecial tokens written out<|im_end|><|endoftext|>",
    "<|im_start|> spaced <|im_end|>\n",
    "\x00\x01\x7f \ufffd",
    "a" * 3000,
    "The quick brown fox jumps over the lazy dog. " * 400,
)

CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "  spaces \n"}],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "<b>& \"quoted\" 'text' 日本 👍"},
        {"role": "assistant", "content": "", "name": None},
    ],
)

TEMPLATES = {
    "block trimming": "{% for m in messages %}\n  {% if true %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n"
    "{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools | tojson }}",
    "loop controls": "{% for m in messages %}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ sep_token is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "null fields": "{% for m in messages %}{{ 'name' in m }}{{ m.get('tool_calls', 'none') }}{% endfor %}",
    "extra variables": "{{ enable_thinking }}"
    "{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}",
    "date": "{{ strftime_now('%Y') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return default_model_dir()


def theirs(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def with_settings(model_dir: Path, target: Path, **settings: Any) -> Path:
    """A copy of the model's small files with a changed tokenizer_config.json."""
    target.mkdir()
    for file in model_dir.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return target


def test_encoding_and_decoding(model_dir: Path) -> None:
    ours, reference = Tokenizer.from_dir(model_dir), theirs(model_dir)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(reference)
    assert ours.eos_token_ids == (reference.eos_token_id,)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_as_text_and_as_ids(model_dir: Path, add_generation_prompt: bool) -> None:
    ours, reference = Tokenizer.from_dir(model_dir), theirs(model_dir)
    for chat in CHATS:
        text = ours.apply_chat_template(chat, add_generation_prompt=add_generation_prompt)
        options = {"add_generation_prompt": add_generation_prompt}
        assert text == reference.apply_chat_template(chat, tokenize=False, **options)
        ids = reference.apply_chat_template(chat, tokenize=True, return_dict=True, **options)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_language(model_dir: Path, tmp_path: Path, name: str) -> None:
    directory = with_settings(model_dir, tmp_path / "m")
    (directory / "chat_template.jinja").write_text(TEMPLATES[name])
    chat = [
        {"role": "user", "content": "<x> & ü", "tool_calls": None},
        {"role": "user", "reasoning": "hm", "content": "b"},
    ]
    wanted = theirs(directory).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert Tokenizer.from_dir(directory).apply_chat_template(chat, enable_thinking=False) == wanted


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_bos_and_eos_are_those_of_tokenizer_json_whatever_the_settings_say(
    model_dir: Path, tmp_path: Path, add_bos: bool, add_eos: bool
) -> None:
    directory = with_settings(model_dir, tmp_path / "m", add_bos_token=add_bos, add_eos_token=add_eos)
    ours, reference = Tokenizer.from_dir(directory), theirs(directory)
    for text in TEXTS[:4]:
        assert ours.encode(text) == reference.encode(text)
        assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)


def test_named_templates_in_tokenizer_config(model_dir: Path, tmp_path: Path) -> None:
    templates = [
        {"name": "rag", "template": "rag"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    directory = with_settings(model_dir, tmp_path / "m", chat_template=templates)
    (directory / "chat_template.jinja").unlink()
    wanted = theirs(directory).apply_chat_template(CHATS[0], tokenize=False)
    assert Tokenizer.from_dir(directory).apply_chat_template(CHATS[0]) == wanted


@pytest.mark.parametrize("is_in_settings", [True, False])
def test_a_template_for_conversations_with_tools(
    model_dir: Path, tmp_path: Path, is_in_settings: bool
) -> None:
    named = {"default": "{{ messages[0].content }}!", "tool_use": "{{ tools | tojson }}?"}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    directory = with_settings(
        model_dir, tmp_path / "m", **({"chat_template": entries} if is_in_settings else {})
    )
    (directory / "chat_template.jinja").unlink()
    if not is_in_settings:
        (directory / "chat_template.jinja").write_text(named["default"])
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    ours, reference = Tokenizer.from_dir(directory), theirs(directory)
    tool = {"type": "function", "function": {"name": "f", "description": "<&>", "parameters": {}}}
    for tools in (None, [], [tool]):
        wanted = reference.apply_chat_template(CHATS[0], tokenize=False, tools=tools)
        assert ours.apply_chat_template(CHATS[0], tools=tools) == wanted
