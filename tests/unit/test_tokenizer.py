"""What the tokenizer says when files or messages are wrong, and how it finds the fast form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.default_model import default_model_dir
from support.tokenizers_of_all_kinds import wordpiece

from twinpool.engine.chat_template import ChatTemplate
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import InvalidRequest, ModelError

USER = [{"role": "user", "content": "hi"}]
CONFIG = {"architectures": ["BertLMHeadModel"], "model_type": "bert", "hidden_size": 8, "num_attention_heads": 2,
          "num_hidden_layers": 1, "vocab_size": 8}  # fmt: skip


def test_a_template_that_refuses_the_messages_is_the_users_mistake() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(
        InvalidRequest, match="does not accept these messages: roles must alternate"
    ) as refused:
        template.render(USER)
    assert refused.value.param == "messages"


def test_a_message_that_the_template_cannot_use_is_the_users_mistake() -> None:
    with pytest.raises(InvalidRequest, match="does not accept these messages"):
        ChatTemplate("{{ 'x' + messages[0].content }}", {}).render([{"role": "user", "content": [1]}])


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(USER)
    with pytest.raises(InvalidRequest, match="unsafe"):
        ChatTemplate("{{ messages.append(1) }}", {}).render(USER)


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template is wrong at line 2"):
        ChatTemplate("\n{% for %}", {})


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        wordpiece().apply_chat_template(USER)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; copy"):
        Tokenizer.from_dir(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer: "):
        Tokenizer.from_dir(tmp_path)


def test_a_slow_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a vocabulary but no tokenizer.json gets its fast form from transformers, in the cache."""
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "bert"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hel", "##lo"])
    )
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    (entry,) = [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    before = (entry / "tokenizer.json").stat().st_mtime_ns
    assert Tokenizer.from_dir(directory).encode("hello") == tokenizer.encode("hello")
    assert (entry / "tokenizer.json").stat().st_mtime_ns == before


def test_the_default_model_ends_at_its_end_of_turn() -> None:
    tokenizer = Tokenizer.from_dir(default_model_dir())
    assert [tokenizer.decode([id_], skip_special_tokens=False) for id_ in tokenizer.eos_token_ids] == [
        "<|im_end|>"
    ]
    assert not tokenizer.has_byte_fallback
