"""Training a backbone together with a prototype head; the only importer of Trainer."""

from prismlm.training.attach import AttachResult, attach
from prismlm.training.attach_estimate import estimate_attach
from prismlm.training.attach_options import AttachOptions
from prismlm.training.estimate import estimate
from prismlm.training.fit import FitOptions
from prismlm.training.lora import LoraOptions
from prismlm.training.model import PrismForCausalLM, PrismOutput
from prismlm.training.objective import LossWeights
from prismlm.training.recipe import Recipe
from prismlm.training.recipe_file import build_recipe, load_recipe
from prismlm.training.run import TrainingInterrupted, TrainingResult, train
from prismlm.training.search.estimate import estimate_search
from prismlm.training.search.result import SearchResult, TrialResult
from prismlm.training.search.search import search
from prismlm.training.trainer import PrismTrainer

__all__ = [
    "AttachOptions",
    "AttachResult",
    "FitOptions",
    "LoraOptions",
    "LossWeights",
    "PrismForCausalLM",
    "PrismOutput",
    "PrismTrainer",
    "Recipe",
    "SearchResult",
    "TrainingInterrupted",
    "TrainingResult",
    "TrialResult",
    "attach",
    "build_recipe",
    "estimate",
    "estimate_attach",
    "estimate_search",
    "load_recipe",
    "search",
    "train",
]
