import os

# Shapes at public boundaries are checked under pytest only: the hook comes before prismlm.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

install_import_hook(["prismlm.ops", "prismlm.layers", "prismlm.models"], "beartype.beartype")

import torch
from hypothesis import settings

settings.register_profile("prismlm", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("prismlm")
torch.set_num_threads(1)
