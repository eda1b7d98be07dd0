"""A small study from its file to its verdict: each arm finds its learning rate, paired seeds decide, a page says so.

python examples/run_a_study.py
"""

import random
import tempfile
from pathlib import Path

from oelm.report.html import write_report
from oelm.report.text import verdict_lines
from oelm.study.execute import run_study
from oelm.study.plan import load_study

STUDY = """
question: What does freezing cost on generated sentences?
base:
  model: {{name: tiny, n_layer: 1, d_model: 32, context: 32}}
  data: {{corpus: {text}, tokenizer: "bpe:300", val_fraction: 0.1}}
  train: {{max_steps: 60, batch_size: 8, eval_every: 30, eval_tokens: 2000}}
  system: {{runs_dir: {place}/runs, data_dir: {place}/data}}
arms: {{baseline: {{}}, oelm: {{}}}}
lr: {{grid: [2.0e-3, 8.0e-3], seeds: [1000]}}   # each arm searches with a seed that the comparison does not use
seeds: [0, 1, 2, 3, 4, 5]                       # six pairs: with fewer, no p below 0.05 exists
decide: {{margin: 1.05}}                        # fixed before the runs
"""

if __name__ == "__main__":  # the runs are processes of their own, which read this file again
    with tempfile.TemporaryDirectory() as place:
        rng = random.Random(0)
        words = ["sun", "rain", "wind", "snow", "fog", "hail", "frost", "heat"]
        stories = [
            " ".join(rng.choices(words, k=4) * 20) for _ in range(150)
        ]  # four words, repeated: worth looking back
        text = Path(place, "weather.txt")
        text.write_text("<|endoftext|>".join(stories))
        file = Path(place, "weather.yaml")
        file.write_text(STUDY.format(text=text, place=place))

        # The same as: oelm study run weather.yaml
        study = load_study(file)
        problems = run_study(study)
        assert not problems
        analysis = write_report(study.folder, study.folder / "report.html")
        print(verdict_lines(analysis))
        print(f"the page: {(study.folder / 'report.html').stat().st_size:,} bytes, opens without a network")
