"""Training a backbone together with a prototype head; the only importer of Trainer."""

from prismlm.training.attach import AttachOptions, AttachResult, attach, estimate_attach
from prismlm.training.fit import FitOptions
from prismlm.training.model import PrismForCausalLM
from prismlm.training.recipe import LossWeights, Recipe, build_recipe, load_recipe
from prismlm.training.run import TrainingResult, estimate, train
from prismlm.training.search import SearchResult, TrialResult, search
from prismlm.training.trainer import PrismTrainer
from prismlm.training.tuning import LoraOptions, TableOptions

__all__ = [
    "AttachOptions",
    "AttachResult",
    "FitOptions",
    "LoraOptions",
    "LossWeights",
    "PrismForCausalLM",
    "PrismTrainer",
    "Recipe",
    "SearchResult",
    "TableOptions",
    "TrainingResult",
    "TrialResult",
    "attach",
    "build_recipe",
    "estimate",
    "estimate_attach",
    "load_recipe",
    "search",
    "train",
]
