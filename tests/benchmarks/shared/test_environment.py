"""What figures were measured with is noted by every benchmark."""

import json
from datetime import date

import torch
import transformers

import prismlm
from benchmarks.shared.environment import environment


def test_what_is_noted():
    found = environment()
    assert date.fromisoformat(found["date"]) <= date.today()
    assert (found["prismlm"], found["torch"]) == (prismlm.__version__, torch.__version__)
    assert found["transformers"] == transformers.__version__
    assert found["machine"].endswith(f", {torch.get_num_threads()} threads, CPU")
    assert found["cores"] >= 1
    assert found["load_average"] >= 0
    json.dumps(found)
