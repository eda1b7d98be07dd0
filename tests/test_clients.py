"""Clients that people train and serve with, each on a model after surgery: docs/clients.md says what holds."""

import copy

import pytest
import torch
from architectures import BATTERY, T, V, build, train_some
from torch import nn
from transformers import AutoModelForCausalLM

import oelm
from oelm import apply_oelm, verify
from oelm.method.verify import VerifyError


def outputs(name, model):
    with torch.no_grad():
        return BATTERY[name].outputs(model.eval())


def test_trl_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl", reason="needs the extra dev (trl)")
    from datasets import Dataset
    from tiny import write_causal
    from transformers import PreTrainedTokenizerFast

    folder = write_causal(tmp_path / "model", "llama")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    report = apply_oelm(model, "oelm-keep")
    rows = Dataset.from_list([{"text": "the cat sat on a mat and saw one dog"}] * 8)
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        learning_rate=1e-2, max_length=16, disable_tqdm=True, bf16=False, save_steps=3, save_strategy="steps",
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, args=settings, train_dataset=rows, processing_class=tokenizer, callbacks=[oelm.OelmCallback()]
    )
    before = model.model.layers[0].self_attn.v_proj.weight.detach().clone()
    trainer.train()
    verify(model, report, optimizer=trainer.optimizer.optimizer)
    assert not torch.equal(model.model.layers[0].self_attn.v_proj.weight, before)
    verify(oelm.load(tmp_path / "out" / "checkpoint-3"))


@pytest.mark.parametrize("kind", ["lora", "oft", "dora"])
@pytest.mark.parametrize("order", ["surgery first", "adapter first"])
def test_peft_trains_on_top_merges_and_removes(kind, order):
    from peft import LoraConfig, OFTConfig, get_peft_model

    targets = ["q_proj", "v_proj"]
    if kind == "oft":
        config = OFTConfig(target_modules=targets, oft_block_size=8)
    else:
        config = LoraConfig(target_modules=targets, use_dora=kind == "dora")
    model = build("llama")
    if order == "surgery first":
        report = apply_oelm(model)
        adapted = get_peft_model(model, config)
    else:
        adapted = get_peft_model(model, config)
        report = apply_oelm(adapted)
    before = {n: p.detach().clone() for n, p in adapted.named_parameters() if "lora" in n or "oft" in n}
    verify(adapted, report, optimizer=train_some("llama", adapted, 3))
    assert any(not torch.equal(p, before[n]) for n, p in adapted.named_parameters() if n in before)
    expected = outputs("llama", adapted)
    oelm.remove(adapted)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(outputs("llama", merged), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("name", "arm"), [("gpt2", "oelm"), ("gpt2", "oelm-slices"), ("llama", "oelm-slices"),
                                           ("llama", "oelm-lora")])  # fmt: skip
def test_dora_on_split_sliced_and_corrected_weights(name, arm):
    from peft import LoraConfig, get_peft_model

    model = build(name)
    report = apply_oelm(model, arm)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, r=4, use_dora=True))
    verify(adapted, report, optimizer=train_some(name, adapted, 3))
    expected = outputs(name, adapted)
    oelm.remove(adapted)
    torch.testing.assert_close(outputs(name, adapted.merge_and_unload()), expected, atol=1e-5, rtol=1e-4)


def test_pissa_goes_before_surgery_and_is_found_out_after_it():
    """It takes the principal part out of the weight it adapts, which is then no longer what was frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights="pissa")
    model = build("llama")
    report = apply_oelm(model)
    get_peft_model(model, config)
    with pytest.raises(VerifyError, match=r"q_proj.weight: (orthogonality error|bytes changed)"):
        verify(model, report)
    model = build("llama")
    apply_oelm(model, "oelm-slices")
    with pytest.raises(RuntimeError, match=r"split or sliced by OELM and cannot be written in place .*oelm.remove"):
        get_peft_model(model, config)
    adapted = get_peft_model(build("llama"), config)
    with pytest.raises(ValueError, match="correction: .*q_proj has an adapter around it; choose this arm first"):
        apply_oelm(adapted, "oelm-lora")
    report = apply_oelm(adapted, "oelm-keep")
    verify(adapted, report, optimizer=train_some("llama", adapted, 3))
    expected = outputs("llama", adapted)
    oelm.remove(adapted)
    torch.testing.assert_close(outputs("llama", adapted.merge_and_unload()), expected, atol=1e-5, rtol=1e-4)


def test_quantised_weights_take_no_frame_and_lose_their_proof():
    class Int8Tensor(torch.Tensor):  # as torchao's: a tensor that cannot be viewed
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if "view" in func.__name__ or "flatten" in func.__name__:
                raise NotImplementedError(f"Int8Tensor dispatch: {func}")
            return super().__torch_function__(func, types, args, kwargs or {})

    def quantise(model):
        layer = model.model.layers[0].self_attn.q_proj
        layer._parameters["weight"] = nn.Parameter(layer.weight.detach().as_subclass(Int8Tensor), requires_grad=False)

    model = build("llama")
    quantise(model)
    with pytest.raises(
        ValueError, match=r"q_proj.weight holds quantised weights \(Int8Tensor\); apply OELM to the full"
    ):
        apply_oelm(model)
    model = build("llama")
    apply_oelm(model)
    quantise(model)
    with pytest.raises(VerifyError, match=r"q_proj.weight: is quantised now \(Int8Tensor\), so the bytes"):
        verify(model)


@pytest.mark.parametrize(("name", "arm"), [("llama", "oelm"), ("llama", "oelm-slices"), ("gpt-neox", "oelm")])
def test_torchao_quantises_what_surgery_has_left(name, arm):
    ao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model = build(name)
    apply_oelm(model, arm)
    expected = outputs(name, model)
    if arm != "oelm" or name == "gpt-neox":
        with pytest.raises(RuntimeError, match=r"cannot be replaced \(quantised, for example\); oelm.remove\(model\)"):
            ao.quantize_(copy.deepcopy(model), ao.Int8WeightOnlyConfig())
    oelm.remove(model)
    ao.quantize_(model, ao.Int8WeightOnlyConfig())
    assert any("Int8" in type(p.data).__name__ for p in model.parameters())
    torch.testing.assert_close(outputs(name, model), expected, atol=2e-2, rtol=2e-2)
    with pytest.raises(ValueError, match="holds quantised weights"):
        apply_oelm(model, arm)


def test_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="needs the extra dev (sentence-transformers)")
    from tiny import write_encoder

    folder = write_encoder(tmp_path / "encoder")
    models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    parts = [models.Transformer(str(folder)), models.Pooling(16)]
    model = library.SentenceTransformer(modules=parts, device="cpu")
    report = apply_oelm(model, "oelm-keep")
    assert report.frozen > 0
    texts = ["the cat sat", "a good dog"]
    features = model.preprocess(texts) if hasattr(model, "preprocess") else model.tokenize(texts)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = model.encode(texts)
    for _ in range(3):
        optimizer.zero_grad()
        model(dict(features))["sentence_embedding"].var(0).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    verify(model, optimizer=optimizer)
    trained = model.encode(texts)
    assert abs(trained - before).max() > 1e-4
    model.save(str(tmp_path / "saved"))
    again = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert abs(again.encode(texts) - trained).max() < 1e-5


@pytest.mark.parametrize(("name", "arm"), [("llama", "oelm"), ("gpt2", "oelm"), ("llama", "oelm-slices")])
def test_torch_export(name, arm):
    model = build(name).eval()
    apply_oelm(model, arm)
    ids = torch.randint(3, V, (2, T))
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}).module()
    torch.testing.assert_close(
        exported(input_ids=ids, use_cache=False).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-4
    )


class Logits(nn.Module):
    """ONNX wants tensors in and out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arm"), [("bert", "oelm"), ("gpt2", "oelm")])
def test_onnx(name, arm, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"needs the extra dev ({package})")
    import onnxruntime

    model = build(name).eval()
    apply_oelm(model, arm)
    plain = Logits(model) if name == "gpt2" else _Classes(model)
    ids = torch.randint(3, V, (2, T))
    torch.onnx.export(plain, (ids,), str(tmp_path / "model.onnx"), dynamo=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), plain(ids), atol=1e-4, rtol=1e-3)


class _Classes(Logits):
    def forward(self, ids):
        return self.model(input_ids=ids).logits


@pytest.mark.parametrize(("name", "arm"), [("gpt2", "oelm"), ("llama", "oelm-slices"), ("llama", "oelm")])
def test_casting_before_surgery_is_verified_and_after_it_is_named(name, arm):
    before = build(name).to(torch.bfloat16)
    apply_oelm(before, arm)
    verify(before)
    BATTERY[name].loss(before).backward()
    verify(before)
    after = build(name)
    report = apply_oelm(after, arm)
    with pytest.raises(VerifyError, match="was float32 at surgery and is bfloat16 now"):
        verify(copy.deepcopy(after).to(torch.bfloat16), report)
    back = after.to(torch.float64).to(torch.float32)
    verify(back, report)


@pytest.mark.slow
def test_fsdp2(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(Path(__file__).with_name("on_fsdp2.py"))],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("verified") == 2
