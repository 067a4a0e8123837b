"""Train prototype heads every way there is a recipe for, and write docs/results/prototype_head/.

    prismlm corpus build sample --out corpus --vocab-size 4096
    python -m benchmarks.prototype_head.measure corpus methods --seed 0        # and 1, 2
    python -m benchmarks.prototype_head.measure corpus sweep --seed 0
    python -m benchmarks.prototype_head.measure corpus sizes --seed 0
    python -m benchmarks.render prototype_head

Every recipe of recipes/prototype_head/ is trained by ``prismlm train`` with the same seed, data
order and schedule. Each is compared with a control: as many random training states as prototypes,
untrained. One JSON file per head; a head whose file exists is not trained again.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus.windows import PackedDataset
from prismlm.explain.quality import measure_quality
from prismlm.files import write_json
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import weight_of
from prismlm.training import build_recipe, load_recipe, train
from prismlm.training.model import sample_states
from prismlm.training.setup import prepare

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "prototype_head"
THIRD = "default-third"
PARTS = ["methods", "sampled", "sweep", "sizes"]
HELD_OUT_TOKENS = 50_000
SWEPT = {"prototypes": [512, 1024, 4096], "prototypes_per_token": [8, 32]}
# Beside llama-laptop, which the methods are compared on.
SIZES = ["llama-tiny", "llama-small"]
# Tokens of the vocabulary that a step's KL is over, and the weight of RES.
SAMPLED = [(size, 0.1) for size in (4096, 2048, 1024, 512)]
SAMPLED += [(1024, weight) for weight in (0.3, 3.0, 10.0)]
Settings = dict[str, Any]


def main() -> None:
    """Run one part."""
    parser = script_options(__doc__, RESULTS / "prototype_head")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    common: Settings = {"corpus": str(args.corpus), "seed": args.seed}
    methods = {name: merged(own, common) for name, own in recipes(RECIPES, []).items()}
    for (kind, name), settings in chosen(args.part, methods).items():
        path = args.out / f"{kind}-{slug(name)}-{args.seed}.json"
        if path.is_file():
            print(f"{path.name} is there")
        else:
            measure(kind, name, settings, path)


def chosen(part: str, methods: dict[str, Settings]) -> dict[tuple[str, str], Settings]:
    """Return the runs of a part, by kind and name."""
    if part == "methods":
        return {("method", n): s for n, s in methods.items() if s["head"]["enabled"]}
    default = methods[THIRD]
    if part == "sampled":
        losses = {(size, r): {"kl_tokens": size, "residual": r} for size, r in SAMPLED}
        return {
            ("sampled", f"{size} tokens, RES × {weight:g}"): merged(default, {"losses": changed})
            for (size, weight), changed in losses.items()
        }
    if part == "sweep":
        return {("sweep", name): settings for name, settings in swept(default).items()}
    return {("size", preset): default | {"model": {"preset": preset}} for preset in SIZES}


def merged(settings: Settings, changes: Settings) -> Settings:
    """Return settings with sections updated, not replaced."""
    result = dict(settings)
    for key, value in changes.items():
        before = result.get(key)
        result[key] = before | value if isinstance(before, dict) else value
    return result


def recipes(folder: Path, overrides: list[str]) -> dict[str, Settings]:
    """Return the settings of every recipe of a folder by name, with values replaced."""
    files = sorted(folder.glob("*.yaml"))
    return {path.stem: load_recipe(path, overrides).to_dict() for path in files}


def swept(default: Settings) -> dict[str, Settings]:
    """Return the default with K and k varied, one at a time."""
    variants = {"K 2048, k 16": default}
    for key, values in SWEPT.items():
        for value in values:
            changed = merged(default, {"head": {key: value}})
            head = changed["head"]
            variants[f"K {head['prototypes']}, k {head['prototypes_per_token']}"] = changed
    return variants


def measure(kind: str, name: str, settings: Settings, path: Path) -> None:
    """Train a model with its head and write the figures of both."""
    with tempfile.TemporaryDirectory() as directory:
        changes = {"out": f"{directory}/model", "evaluation": {"final_tokens": HELD_OUT_TOKENS}}
        recipe = build_recipe(merged(settings, changes))
        began = time.process_time()
        result = train(recipe)
        seconds = time.process_time() - began
        lm, prepared = prismlm.load(result.directory), prepare(recipe)
        control = random_states(lm.model, prepared.rows, lm.head, recipe.seed)
        batches = prepared.heldout.batches(HELD_OUT_TOKENS)
        quality = result.quality
        assert quality is not None
        row = {
            "kind": kind,
            "name": name,
            # The corpus's path says nothing; its name does.
            "settings": settings | {"corpus": Path(settings["corpus"]).name},
            "parameters": lm.model.num_parameters(),
            "tokens": result.tokens,
            "quality": quality.to_dict(),
            "control": measure_quality(lm.model, control, LogitMap.of(lm.model), batches).to_dict(),
            "cpu_seconds": seconds,
            "environment": environment(),
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, row)
    print(f"{path.name}: CE {quality.ce:.4f}, prototype-only CE {quality.prototype_only_ce:.4f}")


def random_states(model: Any, rows: PackedDataset, like: PrototypeHead, seed: int) -> PrototypeHead:
    """Return a head of the same shape, placed on random training states and left there."""
    head = PrototypeHead(like.width, like.num_prototypes, like.prototypes_per_token)
    generator = torch.Generator().manual_seed(seed + 1)
    head.place_on(sample_states(model, rows, head.num_prototypes, generator))
    return head.to(weight_of(model).device).eval().requires_grad_(False)


def slug(name: str) -> str:
    """Return a name as a part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name).replace("--", "-")


if __name__ == "__main__":
    main()
