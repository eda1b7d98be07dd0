"""A small study that the tests of this room change as they need."""

STUDY = {
    "question": "does it plan?",
    "base": {
        "model": {"name": "tiny", "n_layer": 2, "d_model": 64, "context": 64},
        "data": {"tokenizer": "bpe:300"},
        "train": {"max_steps": 100, "warmup_steps": 5},
    },
    "arms": {"baseline": {}, "oelm": {}, "gain-2": {"method": {"arm": "oelm", "gain": 2.0}}},
    "seeds": [0, 1, 2],
    "lr": {"grid": [0.001, 0.002], "seeds": [1000]},
}
