import pytest
import yaml
from study.trial import STUDY

from oelm.study.plan import load_study


@pytest.fixture
def load(tmp_path):
    def with_changes(*words, scale=None, **changes):
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(STUDY | changes, sort_keys=False))
        return load_study(path, [f"base.system.runs_dir={tmp_path}", *words], scale)

    return with_changes
