"""Freeze the queries and keys of a model you already have, train it, prove that nothing frozen moved, save it.

python examples/freeze_a_model.py
"""

import tempfile

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from oelm import apply_oelm, verify

torch.manual_seed(0)

# 1. Any Transformer will do; this one is small and random, so that nothing is downloaded.
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **shape))

# 2. After the model is built, before the optimizer is made. Pretrained weights? Then use "oelm-keep".
report = apply_oelm(model, "oelm")
print(report)

# 3. The optimizer gets what is still trained, and nothing else.
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-3)

# 4. Your own loop. A toy task: does the text begin with a token below 50?
for step in range(1, 201):
    texts = torch.randint(100, (32, 12))
    loss = model(input_ids=texts, labels=(texts[:, 0] < 50).long()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

# 5. The proof: every frozen tensor has the bytes that it had after surgery.
verify(model, optimizer=optimizer)
print(f"verified: {report.frozen:,} of {report.total:,} weights did not move")

# 6. What is saved is a plain Hugging Face folder: it loads without oelm.
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    same = torch.equal(loaded(input_ids=texts).logits, model.eval()(input_ids=texts).logits)
    print(f"loaded {type(loaded).__name__}; the same answers: {same}")
