"""Time training steps with and without the prototype head, in turns, in one run.

    prismlm corpus build sample --out corpus --vocab-size 4096
    python -m benchmarks.prototype_head.step_time corpus

Every second step of the same run leaves the head out, so that both kinds meet the same noise; the
ratio is that of neighbouring steps. Writes docs/results/prototype_head/step-time-MODEL-N.json, N
threads. Another model: --set model.preset=llama-small.

With --compiled every second step runs the blocks that `compile: true` compiles, the others the same
blocks as they are, the head in all of them: compiled-MODEL-N.json.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.prototype_head.measure import RECIPES, merged, recipes
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.turns import ratios
from prismlm.files import write_json
from prismlm.models.device import device_named
from prismlm.training import build_recipe
from prismlm.training.model import initialise_prototypes
from prismlm.training.setup import prepare, vocabulary_sample
from prismlm.training.trainer import PrismTrainer

WARM_UP = 10


class Turns(TrainerCallback):
    """Switches the head, or the compiled blocks, off in every second step, and times all."""

    def __init__(self, compiled: bool) -> None:
        self.seconds: list[float] = []
        self._compiled: dict[torch.nn.Module, Any] | None = {} if compiled else None
        self._began = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch, and start the clock."""
        model, on = kwargs["model"], state.global_step % 2 == 1
        if self._compiled is None:
            model.initialised = on
            model.step = state.global_step // 2
        else:
            for module in model.modules():
                if module._compiled_call_impl is not None:
                    self._compiled[module] = module._compiled_call_impl
            for module, compiled in self._compiled.items():
                module._compiled_call_impl = compiled if on else None
        self._began = _now()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the clock."""
        self.seconds.append(_now() - self._began)


def main() -> None:
    """Time the default recipe."""
    parser = script_options(__doc__, RESULTS / "prototype_head")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--recipes", type=Path, default=RECIPES, help="such as gpt2-small-gpu")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE, as of prismlm train")
    parser.add_argument(
        "--compiled", action="store_true", help="time compiled blocks, not the head"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = recipes(args.recipes, args.set)["default"]
    timed = time_recipe(settings, args.corpus, args.steps, args.compiled)
    print(f"{timed['ratio']:.3f} × without ({timed['low']:.3f} to {timed['high']:.3f})")
    preset = settings["model"]["preset"]
    what = "compiled" if args.compiled else "step-time"
    write_json(
        args.out / f"{what}-{preset}-{args.threads}.json",
        {
            "environment": environment(device_named(settings.get("device", "auto"))),
            "preset": preset,
            "steps": args.steps,
            "recipes": {"default": timed},
        },
    )


def time_recipe(
    settings: dict[str, Any], corpus: Path, steps: int, compiled: bool = False
) -> dict[str, float]:
    """Return the median ratio of a step with the head to its neighbour, and its 95 % interval.

    Or of one whose blocks are compiled to one whose are not.
    """
    with tempfile.TemporaryDirectory() as directory:
        changes = {
            "corpus": str(corpus),
            "steps": 2 * (steps + WARM_UP),
            "head": {"enabled": False, "initialise_at_step": 0},
            "logging": {"tensorboard": False},
            "checkpoint": {"every": 10 * steps},
            "compile": compiled,
        }
        recipe = build_recipe(merged(settings, changes))
        prepared = prepare(recipe)
        tokens = prepared.model.config.vocab_size
        prepared.model.vocabulary = vocabulary_sample(recipe, prepared.corpus, tokens)
        turns = Turns(compiled)
        trainer = PrismTrainer(prepared, Path(directory))
        trainer.add_callback(turns)
        generator = torch.Generator().manual_seed(0)
        initialise_prototypes(prepared.model, prepared.rows, generator)
        trainer.train()
    seconds = np.array(turns.seconds).reshape(-1, 2)[WARM_UP:]
    return ratios(seconds[:, 1].tolist(), seconds[:, 0].tolist()) | {
        "plain_ms": float(1000 * np.median(seconds[:, 0])),
        "head_ms": float(1000 * np.median(seconds[:, 1])),
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
