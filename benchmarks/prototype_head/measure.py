"""Train prototype heads every way there is a recipe for, and write docs/results/prototype_head/.

    prismlm corpus build sample --out corpus --vocab-size 4096
    python -m benchmarks.prototype_head.measure corpus methods --seed 0        # and 1, 2
    python -m benchmarks.prototype_head.measure corpus sweep --seed 0
    python -m benchmarks.prototype_head.measure corpus sizes --seed 0
    python -m benchmarks.render prototype_head

Every recipe of recipes/prototype_head/ is run with the same seed, data order and schedule. Detached
heads share one decoder (see head_bank.py); the others are trained by ``prismlm train`` itself.
Beside each stands the control: as many random training states as prototypes, untrained. One JSON
file per head, so that a sweep can be cut short.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import prismlm
from benchmarks.prototype_head.head_bank import BankTrainer, merged, train_bank
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus.packing import PackedDataset
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import write_json
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import weight_of
from prismlm.training import build_recipe, load_recipe, train
from prismlm.training.prototypes import sample_states
from prismlm.training.setup import prepare

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "prototype_head"
THIRD, VARIED = "default-third", "default-quarter"
PARTS = ["methods", "attached", "detached", "tried", "sampled", "sweep", "sizes"]
HELD_OUT_TOKENS = 50_000
SWEPT = {"prototypes": [512, 1024, 4096], "prototypes_per_token": [8, 32]}
# Beside llama-laptop, which the methods are compared on.
SIZES = ["llama-tiny", "llama-small"]
# What of the training was varied around default-quarter, by the section it belongs to.
TRIED = {
    "head rate 0.06": {"optimizer": {"head_learning_rate": 0.06}},
    "head rate 0.15": {"optimizer": {"head_learning_rate": 0.15}},
    "momenta 0.8, 0.9": {"optimizer": {"betas": [0.8, 0.9]}},
    "momenta 0.9, 0.99": {"optimizer": {"betas": [0.9, 0.99]}},
    "no clipping": {"optimizer": {"head_max_grad_norm": 1e9}},
    "RES × 3": {"losses": {"residual": 0.3}},
    "R1, R2 × 0.1": {"losses": {"prototype_pull": 0.001, "point_pull": 0.001}},
}
# Tokens of the vocabulary that a step's KL is over, and the weight of RES.
SAMPLED = [
    (4096, 0.1),
    (2048, 0.1),
    (1024, 0.1),
    (512, 0.1),
    (1024, 0.3),
    (1024, 3.0),
    (1024, 10.0),
]
Settings = dict[str, Any]


def main() -> None:
    """Run one part."""
    parser = script_options(__doc__, RESULTS / "prototype_head")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of recipes")
    parser.add_argument("--steps", type=int, help="fewer, to try it out")
    parser.add_argument("--recipes", type=Path, default=RECIPES, help="where the recipes are")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE, as of prismlm train")
    arguments = parser.parse_args()
    common: Settings = {"corpus": str(arguments.corpus), "seed": arguments.seed}
    if arguments.steps:
        common |= {"steps": arguments.steps, "head": {"initialise_at_step": arguments.steps // 2}}
    runs = {
        name: merged(settings, common)
        for name, settings in recipes(arguments.recipes, arguments.set).items()
        if not arguments.only or name in arguments.only
    }
    # Every run with a detached head has the plain model in it.
    runs = {name: settings for name, settings in runs.items() if settings["head"]["enabled"]}
    detached = {name: s for name, s in runs.items() if s["head"]["detach"]}
    attached = {name: s for name, s in runs.items() if name not in detached}
    if arguments.part in ("methods", "detached"):
        run_bank("method", detached, arguments.out)
    if arguments.part in ("methods", "attached"):
        for name, settings in attached.items():
            run_attached(name, settings, arguments.out)
    if arguments.part == "tried":
        run_bank("tried", {n: merged(runs[VARIED], c) for n, c in TRIED.items()}, arguments.out)
    if arguments.part == "sampled":
        losses = {(size, r): {"kl_tokens": size, "residual": r} for size, r in SAMPLED}
        varied = {
            f"{size} tokens, RES × {weight:g}": merged(runs[THIRD], {"losses": changed})
            for (size, weight), changed in losses.items()
        }
        run_bank("sampled", varied, arguments.out)
    if arguments.part == "sweep":
        run_bank("sweep", swept(runs[THIRD]), arguments.out)
    if arguments.part == "sizes":
        for preset in SIZES:
            run_bank("size", {preset: runs[THIRD] | {"model": {"preset": preset}}}, arguments.out)


def recipes(folder: Path, overrides: list[str]) -> dict[str, Settings]:
    """Return the settings of every recipe of a folder by name, with values replaced."""
    files = sorted(folder.glob("*.yaml"))
    return {path.stem: load_recipe(path, overrides).to_dict() for path in files}


def swept(default: Settings) -> dict[str, Settings]:
    """Return the default with K and k varied, one at a time."""
    found = {"K 2048, k 16": default}
    for key, values in SWEPT.items():
        for value in values:
            changed = merged(default, {"head": {key: value}})
            head = changed["head"]
            found[f"K {head['prototypes']}, k {head['prototypes_per_token']}"] = changed
    return found


def run_bank(kind: str, runs: dict[str, Settings], out: Path) -> None:
    """Train all heads beside one decoder and write their figures."""
    first = next(iter(runs.values()))
    plain = {key: value for key, value in first.items() if key != "losses"}
    sections = ("head", "losses", "optimizer")
    heads = {name: {key: s[key] for key in sections if key in s} for name, s in runs.items()}
    with tempfile.TemporaryDirectory() as directory:
        began = time.process_time()
        trainer = train_bank(plain, heads, Path(directory))
        seconds = time.process_time() - began
    controls: dict[tuple[int, int], HeadQuality] = {}
    for banked in trainer.bank:
        head = banked.prism.prototype_head
        shape = (head.num_prototypes, head.prototypes_per_token)
        if shape not in controls:
            controls[shape] = control_quality(trainer, *shape)
        write_result(
            out / f"{kind}-{slug(banked.name)}-{first['seed']}.json",
            {
                "kind": kind,
                "name": banked.name,
                "settings": runs[banked.name],
                "parameters": trainer.model.model.num_parameters(),
                "tokens": trainer.tokens_seen(),
                "quality": quality_of(trainer, head).to_dict(),
                "control": controls[shape].to_dict(),
                "cpu_seconds_of_all_heads": seconds,
            },
        )


def run_attached(name: str, settings: Settings, out: Path) -> None:
    """Train a model with its head and write the figures."""
    with tempfile.TemporaryDirectory() as directory:
        changes = {"out": f"{directory}/model", "evaluation": {"final_tokens": HELD_OUT_TOKENS}}
        recipe = build_recipe(merged(settings, changes))
        began = time.process_time()
        result = train(recipe)
        seconds = time.process_time() - began
        lm = prismlm.load(result.directory)
        prepared = prepare(recipe)
        head = lm.head
        assert result.quality is not None
        control = random_states(lm.model, prepared.rows, head, recipe.seed)
        batches = prepared.heldout.batches(HELD_OUT_TOKENS)
        beside = measure_quality(lm.model, control, LogitMap.of(lm.model), batches)
        write_result(
            out / f"method-{slug(name)}-{recipe.seed}.json",
            {
                "kind": "method",
                "name": name,
                "settings": settings,
                "parameters": lm.model.num_parameters(),
                "tokens": result.tokens,
                "quality": result.quality.to_dict(),
                "control": beside.to_dict(),
                "cpu_seconds": seconds,
            },
        )


def quality_of(trainer: BankTrainer, head: PrototypeHead) -> HeadQuality:
    """Measure a head on the held-out text."""
    model = trainer.model.model
    batches = trainer.prepared.heldout.batches(HELD_OUT_TOKENS)
    return measure_quality(model, head, LogitMap.of(model), batches)


def control_quality(trainer: BankTrainer, prototypes: int, per_token: int) -> HeadQuality:
    """Measure as many random training states, untrained."""
    like = PrototypeHead(trainer.model.prototype_head.width, prototypes, per_token)
    rows: Any = trainer.train_dataset
    head = random_states(trainer.model.model, rows, like, trainer.args.seed)
    return quality_of(trainer, head)


def random_states(model: Any, rows: PackedDataset, like: PrototypeHead, seed: int) -> PrototypeHead:
    """Return a head of the same shape, placed on random training states and left there."""
    head = PrototypeHead(like.width, like.num_prototypes, like.prototypes_per_token)
    generator = torch.Generator().manual_seed(seed + 1)
    head.place_on(sample_states(model, rows, head.num_prototypes, generator))
    return head.to(weight_of(model).device).eval().requires_grad_(False)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write one result with the machine and the versions, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Where the corpus lay says nothing; its name does.
    settings = result["settings"] | {"corpus": Path(result["settings"]["corpus"]).name}
    write_json(path, result | {"settings": settings, "environment": environment()})
    figures = result["quality"]
    print(
        f"{path.name}: CE {figures['ce']:.4f}, prototype-only CE "
        f"{figures['prototype_only_ce']:.4f} (control "
        f"{result['control']['prototype_only_ce']:.4f})",
        flush=True,
    )


def slug(name: str) -> str:
    """Return a name as a part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name).replace("--", "-")


if __name__ == "__main__":
    main()
