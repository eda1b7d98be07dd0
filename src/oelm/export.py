"""A trained GPT of ours as a folder that every client loads without `oelm`, with a model card.

Learned positions are GPT-2's arithmetic, rotary ones GPT-NeoX's, and Llama's once each layer norm's subtraction of the
mean is folded into the weights before it. What fits none of them (a relative bias, normalised or smaller queries) keeps
its own modelling code in the folder, for clients that trust it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from .config import parse_config
from .method.arms import OelmConfig
from .method.note import forget_note
from .method.surgery import apply_oelm
from .models import biased, gpt, loss
from .models.build import load_causal
from .models.gpt import GPT, ROTARY_BASE, GPTConfig
from .record import read_run
from .training.audit import audit
from .training.checkpoint import replace_folder

LIMIT = 1e-5  # the logits may differ by this share of their largest
FORMS = ("gpt2", "gptneox", "llama", "own")


def export(run: Path, form: str | None = None, out: Path | None = None) -> tuple[Path, str]:
    """Writes the run's best model in one of FORMS (default: the first that fits); its folder, and what was proven."""
    recorded = (run / "run.json").is_file()
    source = run / "best" if recorded else run
    model = load_causal(source)
    if not isinstance(model, GPT):
        raise ValueError(f"{source}: is a plain {type(model).__name__} folder already; every client loads it as it is")
    if form is not None and form not in FORMS:
        raise ValueError(f"--as: no form {form!r}; choose from {', '.join(FORMS)}")
    form = form or next(name for name in FORMS if not (name in _FITS and _FITS[name](model.config)))
    if form in _FITS and (reason := _FITS[form](model.config)):
        raise ValueError(f"--as: {form} {reason}; --as own keeps the model's own code")
    target = _BUILD[form](model) if form in _BUILD else model
    difference = _difference(model, target)
    if not difference < LIMIT:
        raise ValueError(
            f"{source}: the logits of the {form} model differ by {difference:.1e} of their largest; not written"
        )
    if recorded:
        audit(run)  # the card says what the record promises
    record = read_run(run) if recorded else None
    if form != "own":
        _note(target, record)
    folder = out or run / f"export-{form}"
    if folder.exists() and not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: holds other files; give another folder with -o")
    replace_folder(folder, lambda fresh: _write(fresh, source, target, form, record))
    return folder, f"{type(target).__name__}: logits differ by at most {difference:.1e} of their largest"


def _attention_refuses(config: GPTConfig) -> str:
    if config.qk_norm:
        return "has no norm on queries and keys"
    narrow = config.qk_dim * config.n_head < config.d_model
    return "has queries and keys as large as its values" if narrow else ""


def _gpt2_refuses(config: GPTConfig) -> str:
    if why := _attention_refuses(config):
        return why
    return "" if config.positions == "learned" else f"has learned positions, this model {config.positions} ones"


def _neox_refuses(config: GPTConfig) -> str:
    if why := _attention_refuses(config):
        return why
    return "" if config.positions == "rotary" else f"has rotary positions, this model {config.positions} ones"


def _llama_refuses(config: GPTConfig) -> str:
    return _neox_refuses(config) or ("has no bias in its norms" if config.bias else "")


_FITS: dict[str, Callable[[GPTConfig], str]] = {
    "gpt2": _gpt2_refuses, "gptneox": _neox_refuses, "llama": _llama_refuses,
}  # fmt: skip


def _shared(config: GPTConfig) -> dict[str, Any]:
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {name: getattr(config, name) for name in names}


def _to_gpt2(model: GPT) -> Any:
    c = model.config
    target = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_positions=c.context, n_embd=c.d_model, n_layer=c.n_layer, n_head=c.n_head, n_inner=c.d_ff,
            activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_shared(c),
        )
    )  # fmt: skip
    own = model.state_dict()
    state = {"transformer.wte.weight": own["wte.weight"], "transformer.wpe.weight": own["wpe.weight"]}
    _norm(state, "transformer.ln_f", own, "ln_f")
    for i in range(c.n_layer):
        there, here = f"transformer.h.{i}", f"blocks.{i}"
        _norm(state, f"{there}.ln_1", own, f"{here}.ln_1")
        _norm(state, f"{there}.ln_2", own, f"{here}.ln_2")
        joined = [_linear(own, f"{here}.attn.{role}_proj") for role in "qkv"]
        state[f"{there}.attn.c_attn.weight"] = torch.cat([weight for weight, _ in joined]).T
        state[f"{there}.attn.c_attn.bias"] = torch.cat([bias for _, bias in joined])
        for child, name in (
            ("attn.c_proj", "attn.o_proj"),
            ("mlp.c_fc", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
        ):
            weight, bias = _linear(own, f"{here}.{name}")
            state[f"{there}.{child}.weight"], state[f"{there}.{child}.bias"] = weight.T, bias  # Conv1D is transposed
    state["lm_head.weight"] = own["lm_head.weight"]
    return _filled(target, state)


def _to_neox(model: GPT) -> Any:
    c = model.config
    target = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            hidden_size=c.d_model, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
            intermediate_size=c.d_ff, hidden_act="gelu_new", max_position_embeddings=c.context,
            use_parallel_residual=False, **_rotary(1.0), **_shared(c),
        )
    )  # fmt: skip
    own = model.state_dict()
    state = {"gpt_neox.embed_in.weight": own["wte.weight"], "lm_head.weight": own["lm_head.weight"]}
    _norm(state, "gpt_neox.final_layer_norm", own, "ln_f")
    for i in range(c.n_layer):
        there, here = f"gpt_neox.layers.{i}", f"blocks.{i}"
        _norm(state, f"{there}.input_layernorm", own, f"{here}.ln_1")
        _norm(state, f"{there}.post_attention_layernorm", own, f"{here}.ln_2")
        three = [_linear(own, f"{here}.attn.{role}_proj") for role in "qkv"]
        for kind, tensors in (("weight", [w for w, _ in three]), ("bias", [b for _, b in three])):
            per_head = [tensor.unflatten(0, (c.n_head, 1, -1)) for tensor in tensors]  # q, k, v inside each head
            state[f"{there}.attention.query_key_value.{kind}"] = torch.cat(per_head, 1).flatten(0, 2)
        names = {"attention.dense": "attn.o_proj"}
        names |= {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
        for child, name in names.items():
            state[f"{there}.{child}.weight"], state[f"{there}.{child}.bias"] = _linear(own, f"{here}.{name}")
    return _filled(target, state)


def _to_llama(model: GPT) -> Any:
    """LayerNorm subtracts the mean, RMSNorm does not: so nothing that is added to the residual stream keeps a mean.

    The gate of Llama's feed-forward part carries our activation, and what it multiplies is the constant one.
    """
    c = model.config
    target = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=c.d_model, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
            num_key_value_heads=c.n_head, intermediate_size=c.d_ff, hidden_act="gelu_pytorch_tanh",
            max_position_embeddings=c.context, rms_norm_eps=1e-5, mlp_bias=True, **_rotary(None),
            **_shared(c) | {"tie_word_embeddings": False},  # the head keeps the mean that the embeddings lose
        )
    )  # fmt: skip
    own = model.state_dict()
    embeddings = own["wte.weight"]
    state = {
        "model.embed_tokens.weight": embeddings - embeddings.mean(1, keepdim=True),
        "lm_head.weight": own["lm_head.weight"].clone(),
        "model.norm.weight": own["ln_f.weight"],
    }
    for i in range(c.n_layer):
        there, here = f"model.layers.{i}", f"blocks.{i}"
        state[f"{there}.input_layernorm.weight"] = own[f"{here}.ln_1.weight"]
        state[f"{there}.post_attention_layernorm.weight"] = own[f"{here}.ln_2.weight"]
        for role in "qkv":
            state[f"{there}.self_attn.{role}_proj.weight"] = own[f"{here}.attn.{role}_proj.weight"]
        state[f"{there}.self_attn.o_proj.weight"] = _without_mean(own[f"{here}.attn.o_proj.weight"])
        gate = own[f"{here}.mlp.up_proj.weight"]
        state[f"{there}.mlp.gate_proj.weight"], state[f"{there}.mlp.gate_proj.bias"] = gate, gate.new_zeros(len(gate))
        state[f"{there}.mlp.up_proj.weight"] = torch.zeros_like(gate)
        state[f"{there}.mlp.up_proj.bias"] = gate.new_ones(len(gate))
        state[f"{there}.mlp.down_proj.weight"] = _without_mean(own[f"{here}.mlp.down_proj.weight"])
        state[f"{there}.mlp.down_proj.bias"] = gate.new_zeros(c.d_model)
    return _filled(target, state)


_BUILD: dict[str, Callable[[GPT], Any]] = {"gpt2": _to_gpt2, "gptneox": _to_neox, "llama": _to_llama}


def _rotary(share: float | None) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    return {"rope_parameters": rope if share is None else rope | {"partial_rotary_factor": share}}


def _without_mean(weight: Tensor) -> Tensor:
    return weight - weight.mean(0, keepdim=True)


def _linear(own: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    weight = own[f"{name}.weight"]
    return weight, own.get(f"{name}.bias", weight.new_zeros(len(weight)))


def _norm(state: dict[str, Tensor], there: str, own: dict[str, Tensor], here: str) -> None:
    state[f"{there}.weight"], state[f"{there}.bias"] = _linear(own, here)


def _filled(target: Any, state: dict[str, Tensor]) -> Any:
    target.load_state_dict({name: tensor.contiguous() for name, tensor in state.items()})
    return target.eval()


@torch.no_grad()
def _difference(model: GPT, target: Any) -> float:
    """The largest difference of the logits, as a share of the largest logit, on random tokens of full length."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, model.config.context), generator=generator)
    expected, found = model(input_ids=ids).logits, target(input_ids=ids).logits
    return float((found - expected).abs().max() / expected.abs().max())


def _note(target: Any, record: dict[str, Any] | None) -> None:
    """Where the run froze whole projections, the exported folder says so in its own words, and oelm.load honours it."""
    forget_note(target)
    if record is None:
        return
    config = parse_config(record["config"]).method.oelm(record["config"]["init_seed"])
    whole = not (config.temperature or config.input_gains or config.correction or config.schedule)
    if config.freeze and whole:
        apply_oelm(
            target, OelmConfig(init="keep", freeze=config.freeze, layers_to_transform=config.layers_to_transform)
        )


def _write(folder: Path, source: Path, target: Any, form: str, record: dict[str, Any] | None) -> None:
    if form == "own":
        target.config.auto_map = {"AutoConfig": "gpt.GPTConfig", "AutoModelForCausalLM": "gpt.GPT"}
        for module in (gpt, biased, loss):
            text = Path(str(module.__file__)).read_text(encoding="utf-8")
            (folder / Path(str(module.__file__)).name).write_text(_standing_alone(text), encoding="utf-8")
    target.save_pretrained(folder)
    for path in source.glob("token*"):
        shutil.copy(path, folder / path.name)
    for path in source.glob("special_tokens*"):
        shutil.copy(path, folder / path.name)
    (folder / "README.md").write_text(model_card(target, form, record), encoding="utf-8")


def _standing_alone(text: str) -> str:
    """Modelling code without what only surgery and registration need."""
    text = text.partition("\nAutoConfig.register(")[0]  # auto_map does it in a folder
    plain = "\n\ndef query_and_key(q_proj, k_proj, x):\n    return q_proj(x), k_proj(x)\n"
    text, found = re.subn(r"^from \.\.method\.pair import query_and_key\n", "", text, flags=re.M)
    text = text.replace("\nRotary = ", f"{plain}\n\nRotary = ", 1) if found else text
    if re.search(r"^from \.\.", text, flags=re.M):
        raise ValueError("--as: the model's own code reads other parts of oelm, so it cannot stand alone")
    return text


def model_card(model: Any, form: str, record: dict[str, Any] | None) -> str:
    """What the model is, what was measured, how to load and how to verify it: from the run's record alone."""
    trust = ", trust_remote_code=True" if form == "own" else ""
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        "- oelm",
        "---",
        "",
        "# A language model trained with `oelm`",
        "",
    ]
    if record:
        config, surgery, best = record["config"], record.get("surgery", {}), record.get("totals", {}).get("best", {})
        lines += [
            f"* arm: `{config['method']['arm']}`, {surgery.get('frozen', 0):,} of {surgery.get('total', 0):,} weights "
            "frozen during training",
            f"* data: `{config['data']['corpus']}`, tokenizer `{config['data']['tokenizer']}`",
        ]
        if best:
            lines.append(
                f"* validation: perplexity {best['ppl']:.2f} ({best['bits_per_byte']:.3f} bits per byte) at step "
                f"{best['step']:.0f}, seed {config['init_seed']}; one run, so no claim about the arm"
            )
        if "flops_per_token" in record:
            lines.append(f"* freezing can save at most {record['flops_per_token']['ceiling']:.1%} of a training step")
        lines.append(
            f"* run `{record['id']}`; `oelm verify` on its folder re-checks the frozen bytes and the numbers above"
        )
    parameters = sum(p.numel() for p in model.parameters())
    lines += [
        f"* this folder: `{type(model).__name__}`, {parameters:,} parameters", "", "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'model = AutoModelForCausalLM.from_pretrained("this/folder"{trust})',
        'tokenizer = AutoTokenizer.from_pretrained("this/folder")', "```", "",
    ]  # fmt: skip
    if getattr(model.config, "oelm", None):
        lines += [
            'To train it further with the same projections frozen, `oelm.load("this/folder")` freezes them again and '
            "proves their bytes.", "",
        ]  # fmt: skip
    return "\n".join(lines)
