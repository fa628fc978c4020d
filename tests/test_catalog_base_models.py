"""Base models from folders, GGUF files and names: read by header, refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import save_file

from nbtrain.catalog import EMBEDDED, Catalog, tokenizer_digest
from nbtrain.catalog.gguf_files import read_header
from nbtrain.errors import NotFound, Refused
from nbtrain.store import open_store

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def catalog(home: Path) -> Catalog:
    return Catalog(open_store(home))


def model_folder(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((3, 4)), "b": np.ones(5)}, path / "model.safetensors")
    return path


def gguf_file(path: Path, arch: str = "llama", **more: Any) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_name("Small one")
    writer.add_context_length(512)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "☃"])
    writer.add_array("some.numbers", [1, 2, 3])
    for key, value in more.items():
        writer.add_key_value(f"{arch}.{key}".replace("__", "."), *value)
    writer.add_tensor("a", np.ones((4, 8), dtype=np.float32))
    packed = np.zeros((2, 34), dtype=np.uint8)
    writer.add_tensor("b", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(catalog: Catalog, ref: object) -> str:
    with pytest.raises(Refused) as refused:
        catalog.base_model(str(ref))
    return str(refused.value)


# --- folders


def test_a_folder(catalog: Catalog, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    model = catalog.base_model(str(folder))
    assert (model.slug, model.kind, model.location) == (str(folder), "folder", str(folder))
    assert (model.max_context, model.precision, model.parameters) == (2048, "bf16", 17)
    assert len(model.fingerprint) == 64
    assert catalog.base_model(model) is model


def test_relative_and_home_paths_mean_the_same_folder(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for ref in ("./m", "~/m", f"{tmp_path}/../{tmp_path.name}/m"):
        assert catalog.base_model(ref).location == str(folder)


def test_real_tiny_families_pass_with_their_own_numbers(catalog: Catalog, tmp_path: Path) -> None:
    from transformers import (
        AutoModelForCausalLM,
        GemmaConfig,
        GPT2Config,
        LlamaConfig,
        Phi3Config,
        Qwen3Config,
    )

    size = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    configs = [
        LlamaConfig(**size),
        Qwen3Config(**size),
        GemmaConfig(**size),
        Phi3Config(**size, sliding_window=None),
        GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    ]
    for config in configs:
        folder = tmp_path / config.model_type
        real = AutoModelForCausalLM.from_config(config)
        real.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        model = catalog.base_model(str(folder))
        assert (model.architecture, model.max_context) == (config.model_type, 64)
        assert model.parameters == real.num_parameters()


def test_the_fingerprint_follows_weights_and_configuration(
    catalog: Catalog, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m")
    copy = model_folder(tmp_path / "copy")
    first = catalog.base_model(str(folder)).fingerprint
    assert catalog.base_model(str(copy)).fingerprint == first
    save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, copy / "model.safetensors")
    other_weights = catalog.base_model(str(copy)).fingerprint
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    other_config = catalog.base_model(str(folder)).fingerprint
    assert len({first, other_weights, other_config}) == 3


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"],
)
def test_the_fingerprint_follows_what_the_model_reads_and_writes(
    name: str, catalog: Catalog, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m")
    first = catalog.base_model(str(folder)).fingerprint
    (folder / name).write_text('{"changed": 1}')
    changed = catalog.base_model(str(folder)).fingerprint
    assert changed != first
    (folder / "README.md").write_text("no part of it")
    assert catalog.base_model(str(folder)).fingerprint == changed


def test_weights_are_hashed_once(catalog: Catalog, home: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    fingerprint = catalog.base_model(str(folder)).fingerprint
    memory = home / "base_models" / "digests.json"
    known = json.loads(memory.read_text())
    (path,) = [p for p in known if p.endswith("m/model.safetensors")]
    known[path][1] = "0" * 64
    memory.write_text(json.dumps(known))
    assert catalog.base_model(str(folder)).fingerprint != fingerprint  # taken from memory
    memory.write_text("not json")
    assert catalog.base_model(str(folder)).fingerprint == fingerprint  # and read anew without it


def test_what_is_missing_is_said_all_at_once(catalog: Catalog, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", is_encoder_decoder=True)
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    said = refusal(catalog, folder)
    assert "3 problems" in said
    assert "is an encoder-decoder" in said
    assert "no safetensors weights" in said
    assert "pytorch_model.bin is a pickle" in said
    assert "has no tokenizer" in said


def shards(folder: Path, *names: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in names[:-1]:
        save_file({name: np.zeros(2)}, folder / name)
    index = {"weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is cut short: "),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "is no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "is no safetensors file"),
        (
            lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com"),
            "git lfs pull",
        ),
        (lambda f: shards(f, "a.safetensors", "b.safetensors"), "lacks 1 of 2 weight files (b.s"),
        (lambda f: shards(f, "../x"), "outside its folder"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    ],
)
def test_damaged_folders(catalog: Catalog, tmp_path: Path, damage: Any, said: str) -> None:
    folder = model_folder(tmp_path / "m")
    catalog.base_model(str(folder))
    damage(folder)
    assert said in refusal(catalog, folder)


def test_shards_count_together(catalog: Catalog, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    shards(folder, "a.safetensors", "b.safetensors", "c.safetensors")
    save_file({"c": np.zeros(3)}, folder / "c.safetensors")
    assert catalog.base_model(str(folder)).parameters == 7


def test_places_where_no_model_is(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no folder"):
        catalog.base_model(str(tmp_path / "nothing"))
    with pytest.raises(NotFound, match=r"holds no config\.json"):
        catalog.base_model(str(tmp_path))


def test_the_tokenizer_has_a_digest_of_its_own(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    before = tokenizer_digest(folder)
    (folder / "config.json").write_text("{}")
    assert tokenizer_digest(folder) == before
    (folder / "chat_template.jinja").write_text("x")
    assert tokenizer_digest(folder) != before


# --- GGUF


def test_a_gguf_file_is_read_by_its_header(catalog: Catalog, tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "small.gguf")
    model = catalog.base_model(str(path))
    assert (model.kind, model.slug, model.location) == ("gguf", str(path), str(path))
    assert (model.architecture, model.max_context, model.precision) == ("llama", 512, "bf16")
    assert model.parameters == 4 * 8 + 2 * 32
    assert read_header(path).name == "Small one"


def test_our_header_reader_agrees_with_the_packages_own(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = gguf_file(tmp_path / "small.gguf", block_count=(3, 4), rope__freq_base=(1e4, 6))
    ours = read_header(path)
    theirs = GGUFReader(path)
    for name, value in ours.keys.items():
        assert theirs.fields[name].contents() == value
    assert ours.parameters == sum(int(t.n_elements) for t in theirs.tensors)


def test_a_gguf_cut_anywhere_is_not_found(catalog: Catalog, tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    padding = 32  # the last tensor is padded at its end, which nobody misses
    for size in range(0, len(whole) - padding, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(NotFound, match=r"cut short|no GGUF file"):
            catalog.base_model(str(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04 and more", "is no GGUF file"),
        (b"GGUF\x01\0\0\0", "has GGUF version 1"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 40, "cut short or damaged"),
    ],
)
def test_what_is_no_gguf(catalog: Catalog, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(NotFound, match=said):
        catalog.base_model(str(path))
    with pytest.raises(NotFound, match="there is no file"):
        catalog.base_model(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize(
    ("arch", "more", "said"),
    [
        ("rwkv", {}, "outside a cache of transformers (rwkv)"),
        ("t5", {"decoder_start_token_id": (0, 4)}, "encoder-decoder"),
        ("bert", {"attention__causal": (False, 7)}, "no causal language model"),
    ],
)
def test_gguf_architectures_are_refused_by_name(
    catalog: Catalog, tmp_path: Path, arch: str, more: dict[str, Any], said: str
) -> None:
    assert said in refusal(catalog, gguf_file(tmp_path / "x.gguf", arch, **more))


# --- names


def test_selected_names(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "one")
    gguf_file(tmp_path / "two.gguf")
    monkeypatch.chdir(tmp_path)
    chosen = catalog.select_base_model("one", "mine")  # a folder, although written like a name
    assert (chosen.slug, chosen.location) == ("mine", str(tmp_path / "one"))
    monkeypatch.chdir("/")
    assert catalog.base_model("mine") == chosen
    moved = catalog.select_base_model(tmp_path / "two.gguf", "mine")
    assert catalog.base_model("mine") == moved
    assert [model.slug for model in catalog.base_models()] == [EMBEDDED, "mine"]


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b/c", "x.gguf", "nbtrain/own", "-x", "/x"])
def test_names_that_cannot_be(catalog: Catalog, tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match="name"):
        catalog.select_base_model(model_folder(tmp_path / "m"), name)


def test_unknown_names_say_what_there_is(catalog: Catalog, tmp_path: Path) -> None:
    catalog.select_base_model(model_folder(tmp_path / "m"), "smollm")
    with pytest.raises(NotFound, match=r"did you mean 'smollm'\? known here: nbtrain/tiny, smollm"):
        catalog.base_model("smolm")
    with pytest.raises(NotFound, match="did you mean 'nbtrain/tiny'"):
        catalog.base_model("nbtrain/tny")
    for ref in (None, "", 3):
        with pytest.raises(NotFound, match="is no base model"):
            catalog.base_model(ref)
    with pytest.raises(Refused, match="always there"):
        catalog.select_base_model(EMBEDDED, "t")


def test_reading_models_imports_no_torch(home: Path) -> None:
    code = (
        "import sys; from nbtrain.catalog import Catalog; from nbtrain.store import open_store\n"
        "Catalog(open_store()).base_model('nbtrain/tiny')\n"
        "print([m for m in ('torch', 'transformers', 'pandas', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "./a\0b", "./" + "x" * 5000])
def test_a_path_that_is_none_is_refused(catalog: Catalog, path: str) -> None:
    for ask in (catalog.base_model, lambda ref: catalog.select_base_model(ref, "m")):
        with pytest.raises(Refused, match="is no path that can be used"):
            ask(path)
