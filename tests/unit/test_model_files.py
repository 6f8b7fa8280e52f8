"""What the user may call a model, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_gguf import TinyLlama, write_tiny_llama

from twinpool.engine.model_files import resolve
from twinpool.engine.tokenizer import Tokenizer
from twinpool.errors import ModelError


def model_directory(path: Path, *files: str) -> Path:
    path.mkdir()
    for name in files:
        (path / name).write_bytes(b"{}")
    return path


def test_a_directory_with_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "mine", "config.json", "model.safetensors")
    model = resolve(str(directory))
    assert (model.path, model.name) == (directory, "mine")


def test_a_directory_that_looks_like_a_hub_id_is_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    model_directory(tmp_path / "org" / "model", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model").path == Path("org/model")


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m", "config.json", "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \*\.safetensors\. Pickled weights .* can run code"):
        resolve(str(directory))
    assert resolve(str(directory), needs_weights=False).path == directory


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(model_directory(tmp_path / "m", "model.safetensors")))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m", "config.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files \(b\.safetensors"):
        resolve(str(directory))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}', "\x00"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match="is no index of weight files"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/no/such/place", "there is no directory /no/such/place, and it is no Hugging Face id"),
        ("no/such.gguf", r"there is no file no/such\.gguf"),
        (
            "some-org/some-model",
            "neither a directory here nor in the Hugging Face cache, and HF_HUB_OFFLINE is set",
        ),
    ],
)
def test_what_does_not_exist_is_named(model: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=sentence):
        resolve(model)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content, sentence in (
        ("model.bin", b"", "is a file, and no .gguf"),
        ("cut.gguf", b"<html>", "does not begin like a GGUF file"),
        ("big-00001-of-00003.gguf", b"GGUF", "merge the parts first"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=sentence):
            resolve(str(tmp_path / name))


def test_a_gguf_becomes_safetensors_with_tokenizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those that went into the file, bfloat16, with GGUF's permuted rows put right."""
    import torch
    from safetensors.torch import load_file

    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    tiny = TinyLlama()
    file = tmp_path / "tiny.gguf"
    write_tiny_llama(tiny, file)
    model = resolve(str(file))
    assert model.name == "tiny"
    saved = load_file(model.path / "model.safetensors")
    for name, wanted in tiny.weights().items():
        assert saved[name].dtype is torch.bfloat16
        assert torch.equal(saved[name], torch.from_numpy(wanted).to(torch.bfloat16)), name
    assert "quantization_config" not in json.loads((model.path / "config.json").read_text())
    tokenizer = Tokenizer.from_dir(model.path)
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == "<user>ab"
    moved = tmp_path / "moved.gguf"
    file.rename(moved)
    assert resolve(str(moved)).path == model.path


def test_a_broken_gguf_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted: \w+: "):
        resolve(str(file))
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_neither_model_files_nor_tokenizer_import_torch_or_transformers() -> None:
    question = (
        "import sys, twinpool.engine.model_files, twinpool.engine.tokenizer\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    source = Path(__file__).parents[2] / "src"
    code = f"import sys; sys.path.insert(0, {str(source)!r})\n{question}"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
