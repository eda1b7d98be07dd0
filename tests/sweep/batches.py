"""Made-up inputs: passes through a model, or through parts of it, that reach its attention.

The whole model is tried first. What it does not reach (a vision tower without pictures in the text, a decoder without
an encoder) is reached by running the largest part of the model around it that runs by itself.
"""

import contextlib
import inspect
import itertools

import torch
from torch import nn

ROWS, TOKENS = 2, 12
TRIES = 400  # of arguments, for one model


class Passes:
    """Forward passes by path, each with its arguments; calling it runs all of them on a model of the same class."""

    def __init__(self):
        self.taken = []  # (path, arguments)
        self.reached = set()

    def __call__(self, model):
        outputs = []
        for path, arguments in self.taken:
            torch.manual_seed(0)
            outputs.append(model.get_submodule(path)(**_copied(arguments)))
        return outputs


def find_passes(model, wanted):
    """Passes that together call as many of the wanted modules as can be, each from its attention module or further out
    (`wanted`: module -> attention module); and why the first try failed."""
    passes, reason, left = Passes(), "", TRIES
    hooks = [model.get_submodule(name).register_forward_hook(_Note(passes.reached, name)) for name in wanted]
    try:
        for path in _places(model, wanted):
            inside = {name for name in wanted if name.startswith(f"{path}.") or not path or name == path}
            for arguments in attempts(model.get_submodule(path), model, min(inside, key=list(wanted).index)):
                if inside <= passes.reached or not left:
                    break
                left, before = left - 1, set(passes.reached)
                try:
                    torch.manual_seed(0)
                    with torch.no_grad():
                        output = model.get_submodule(path)(**_copied(arguments))
                except Exception as error:  # not a batch for this module
                    passes.reached.intersection_update(before)
                    reason = reason or f"{type(error).__name__}: {error}".partition("\n")[0][:120]
                    continue
                if tensors(output) and (passes.reached - before or not (path or passes.taken)):
                    passes.taken.append((path, arguments))
    finally:
        for hook in hooks:
            hook.remove()
    return passes, reason


class _Note:
    def __init__(self, reached, name):
        self.reached, self.name = reached, name

    def __call__(self, *_):
        self.reached.add(self.name)


def _places(model, wanted):
    """The whole model, then whole models inside it, then any module around what is wanted; the outermost first."""
    around = [f"{site}." for site in dict.fromkeys(wanted.values())]
    above = {name[:i] for name in around for i in range(len(name)) if name[i] == "."}
    inner = [path for path, module in model.named_modules() if path in above]
    whole = [p for p in inner if hasattr(model.get_submodule(p), "config") and _main_input(model.get_submodule(p))]
    return ["", *whole, *[p for p in inner if p not in whole and not isinstance(_at(model, p), nn.ModuleList)]]


def _at(model, path):
    return model.get_submodule(path)


def _main_input(module):
    return getattr(module, "main_input_name", None)


def _copied(arguments):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def attempts(module, model, inside):
    """Sets of arguments that the module's signature may mean, the likeliest first."""
    config = getattr(module, "config", None) or getattr(model, "config", None)
    text = config
    if callable(getattr(config, "get_text_config", None)) and not _field(config, "vocab_size"):
        with contextlib.suppress(ValueError):  # it may have several
            text = config.get_text_config()
    names = inspect.signature(module.forward).parameters
    makers = _makers(module, model, config, text, inside)
    known = {name: makers[name] for name in names if makers.get(name)}
    must = {n for n, p in names.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    if must - set(known):
        return
    if "input_ids" in known and "inputs_embeds" not in must:
        known.pop("inputs_embeds", None)
    extra = [name for name in known if name in OPTIONAL and name not in must]
    base = [name for name in known if name not in extra]
    main = [name for name in [_main_input(module)] if name in extra]
    seen = 0
    wide = [main, [], *[[name] for name in extra], *itertools.combinations(extra, 2), extra]
    for given in wide:
        chosen = {name: known[name] for name in [*base, *given]}
        for number in range(max((len(m) for m in chosen.values()), default=1)):
            try:
                yield {name: options[min(number, len(options) - 1)]() for name, options in chosen.items()}
            except (TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError):
                continue
            seen += 1
            if seen > 80:
                return


# Given only when the module does not run, or reaches too little, without them.
OPTIONAL = {"pixel_values", "pixel_mask", "attention_mask", "input_features", "input_values", "decoder_input_ids",
            "input_features_mask", "feature_attention_mask", "labels", "token_type_ids", "encoder_outputs",
            "encoder_hidden_states", "inputs_embeds", "decoder_inputs_embeds",
            "position_embeddings", "qformer_input_ids", "cross_attention_states", "hidden_states_output"}  # fmt: skip


def _field(config, *names):
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # some configurations refuse to be asked for what differs between layers
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _deep(config, *names, depth=0):
    """A field of a configuration or of one inside it."""
    if config is None or (found := _field(config, *names)):
        return found if config is not None else None
    for inner in vars(config).values():
        if hasattr(inner, "to_dict") and depth < 3 and (found := _deep(inner, *names, depth=depth + 1)):
            return found
    return None


def _makers(module, model, config, text, inside):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return lambda: torch.randn(*shape, generator=generator)

    vocab = _field(text, "vocab_size") or _deep(config, "vocab_size") or 100
    shape = (ROWS, 2, TOKENS) if type(module).__name__.endswith("MultipleChoice") else (ROWS, TOKENS)

    def ids():
        found = torch.randint(4, max(5, min(100, vocab)), shape, generator=generator)
        end = getattr(text, "eos_token_id", None)
        if isinstance(end, int) and 0 <= end < vocab:
            found[..., -1] = end
        return found

    books = _deep(config, "num_codebooks") or 1
    coded = [lambda n=n: torch.randint(4, 20, (ROWS, TOKENS, books + n), generator=generator) for n in (0, 1)]
    width = _width(module, model, inside)
    hidden = _field(text, "hidden_size", "d_model", "n_embd", "dim") or _deep(config, "hidden_size", "d_model") or 32
    size = getattr(config, "image_size", None) or _deep(config, "image_size") or 32
    size = size if isinstance(size, int) else next(iter(size), 32) if isinstance(size, list | tuple) else 32
    channels = _deep(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _deep(config, "num_frames") or 4
    patch = _deep(config, "patch_size") or 8
    temporal = _deep(config, "temporal_patch_size") or 1
    mel = _deep(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "mel_bins",
                "feature_projection_input_dim", "num_mel_features", "input_feat_size", "input_dim") or 80  # fmt: skip
    read = next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), mel)  # by the first layer
    length = 2 * (_deep(config, "max_source_positions") or 64)
    head = _deep(config, "head_dim") or hidden // (_deep(config, "num_attention_heads", "num_heads") or 4)
    ones = [lambda: torch.ones(shape, dtype=torch.long)]
    grid = torch.tensor([[1, 4, 4]])
    flat = [normal(16, channels * t * patch * patch) for t in dict.fromkeys((temporal, 1, 2))]
    states = [normal(ROWS, TOKENS, width), normal(ROWS, TOKENS, read), normal(ROWS, 16, width),
              normal(16, width), normal(ROWS, 4, 4, width)]  # fmt: skip
    pictures = [
        normal(ROWS, channels, size, size), normal(ROWS, frames, channels, size, size),
        normal(ROWS, 2, channels, size, size), normal(ROWS, 2, channels, 64, 64),
        normal(ROWS, channels, 64, 64), normal(ROWS, channels, 224, 224),
        normal(ROWS, channels, 2 * size, size), normal(ROWS, 2, 1, 64, 64), *flat,
        normal(ROWS, 16, channels * patch * patch),
    ]  # fmt: skip
    features = [normal(ROWS, mel, length), normal(ROWS, length, mel), normal(ROWS, length, read),
                normal(ROWS, mel, 3000),
                normal(ROWS, length, 80), normal(ROWS, 80, length), normal(ROWS, 128, length),
                *[normal(ROWS, length, n) for n in (160, 320, 560)],
                normal(ROWS, 1, length, mel)]  # fmt: skip
    turned = (torch.ones(ROWS, TOKENS, head), torch.zeros(ROWS, TOKENS, head))
    flat_turned = (torch.ones(16, head), torch.zeros(16, head))
    wave = [normal(ROWS, 4000), normal(ROWS, 1, 4000), normal(ROWS, 16000), normal(ROWS, mel, length),
            normal(ROWS, length, mel), normal(ROWS, 1, 16000), normal(ROWS, 1, 3840 * 4)]  # fmt: skip
    masks = [lambda: torch.ones(ROWS, length, dtype=torch.long), lambda: torch.ones(ROWS, 3000, dtype=torch.long)]
    series = (_field(config, "context_length") or 8) + max(getattr(config, "lags_sequence", None) or [0])
    values = [normal(ROWS, series), normal(ROWS, series, _field(config, "num_input_channels") or 1)]
    return {
        "input_ids": [ids, *coded, lambda: torch.randint(4, 20, (ROWS * books, TOKENS), generator=generator)],
        "decoder_input_ids": [ids], "qformer_input_ids": [ids], "task_inputs": [ids],
        "inputs": [ids, *pictures, *states],
        "attention_mask": [lambda: None, *ones], "decoder_attention_mask": [lambda: None],
        "global_attention_mask": [lambda: torch.eye(1, TOKENS, dtype=torch.long).expand(ROWS, -1).clone()],
        "token_type_ids": [lambda: torch.zeros(shape, dtype=torch.long)],
        "position_ids": [lambda: torch.arange(TOKENS).expand(ROWS, -1)] if "position_ids" in _must(module) else [],
        "pixel_values": pictures, "pixel_values_videos": [normal(ROWS, frames, channels, size, size), *flat],
        "pixel_mask": [lambda: torch.ones(ROWS, size, size, dtype=torch.long)],
        "pixel_position_ids": [lambda: torch.stack(torch.meshgrid(*[torch.arange(4)] * 2, indexing="ij"), -1)
                               .flatten(0, 1).expand(ROWS, -1, -1)],
        "grid_thw": [lambda: grid.clone()], "image_grid_thw": [lambda: grid.clone()],
        "input_features": features, "input_values": wave, "audio_values": wave, "input_features_mask": masks,
        "feature_attention_mask": masks, "audio_features": features, "audio_input_features": features,
        "bbox": [lambda: torch.zeros(ROWS, TOKENS, 4, dtype=torch.long), lambda: torch.zeros(ROWS, TOKENS, 8),
                 lambda: torch.zeros(ROWS, TOKENS, 4)],
        "visual_feats": [normal(ROWS, 5, _field(config, "visual_feat_dim") or 32)],
        "visual_pos": [normal(ROWS, 5, 4)],
        "past_values": values, "past_time_features": [normal(ROWS, series, 1)],
        "past_observed_mask": [lambda: torch.ones(ROWS, series)],
        "inputs_embeds": [normal(ROWS, TOKENS, hidden), normal(ROWS, TOKENS, width)],
        "query_embeds": [normal(ROWS, TOKENS, hidden)],
        "hidden_states": [*flat, *states] if "grid_thw" in _must(module) else [*states, *flat],
        "hidden_state": states, "x": states, "query": states, "key": states, "value": states, "input": states,
        "query_states": states, "key_value_states": states, "hidden_states_1": states,
        "encoder_hidden_states": [normal(ROWS, TOKENS, hidden), normal(ROWS, TOKENS, width)],
        "position_embeddings": [lambda: turned, lambda: flat_turned, lambda: (turned[0][:1], turned[1][:1])],
        "cu_seqlens": [lambda: torch.tensor([0, 16], dtype=torch.int32)],
        "states": [normal(ROWS, TOKENS, _field(config, "state_dim") or 17)],
        "actions": [normal(ROWS, TOKENS, _field(config, "act_dim") or 4)],
        "rewards": [normal(ROWS, TOKENS, 1)], "returns_to_go": [normal(ROWS, TOKENS, 1)],
        "timesteps": [lambda: torch.arange(TOKENS).expand(ROWS, -1)],
        "target_sizes": [lambda: torch.tensor([[4, 4]] * ROWS)],
        "lang_ids": [lambda: torch.zeros(ROWS, dtype=torch.long)],
        "use_cache": [lambda: False], "output_attentions": [lambda: False],
        "input_points": [normal(ROWS, 1, 1, 2)],
    }  # fmt: skip


def _must(module):
    parameters = inspect.signature(module.forward).parameters
    return {name for name, p in parameters.items() if p.default is p.empty}


def _width(module, model, inside):
    """What the first wanted linear layer in the module reads."""
    weight = getattr(model.get_submodule(inside), "weight", None)
    if weight is None:
        return getattr(model.get_submodule(inside), "embed_dim", 32)
    return weight.shape[1] if isinstance(model.get_submodule(inside), nn.Linear) else weight.shape[0]


def tensors(output):
    """Every floating tensor that a pass computed."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else []
    return list(itertools.chain.from_iterable(tensors(value) for value in values))
