"""Time one part of prismlm on a GPU and add it to OUT_DIR/gpu.json; timing_gpu.sh runs them all.

    python -m benchmarks.gpu.timing OUT_DIR PART           on a GPU
    python -m benchmarks.gpu.timing OUT_DIR PART --tiny    on a CPU, to see that it runs

Models are made of configurations with random weights; texts are those of the bundled sample.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2LMHeadModel

from benchmarks.prototype_mixer.timing import autocast
from benchmarks.shared.environment import environment
from benchmarks.shared.options import script_options
from benchmarks.shared.turns import in_turns, milliseconds, ratios
from prismlm.files import read_json, write_json
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model

Figures = dict[str, Any]
ROUNDS = 7
VOCABULARY = 50_257
RECIPE = "recipes/gpt2-small-gpu/default.yaml"
TINY_MODEL = {"n_embd": 32, "n_layer": 2, "n_head": 2}
# What waits for a GPU, as its runtime names it; and on a CPU, what would wait for one.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LOOKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2")


class Setting(NamedTuple):
    """Where parts run, whether at tiny sizes, and where they may leave files for each other."""

    device: str
    tiny: bool
    work: Path

    def size(self, full: int, tiny: int) -> int:
        """Return the one of two sizes."""
        return tiny if self.tiny else full


# -- the head


def head_in_model(setting: Setting, preset: str, rows: int, rounds: int) -> Figures:
    """Time training steps of a model with 16,384 prototypes beside steps without them.

    Loss, gradients, clipping and AdamW, in bf16; the head learns from every fourth position. Both
    take turns in one model. ``waits`` counts how often a step waits for the GPU.
    """
    from prismlm.training import PrismForCausalLM

    length, vocabulary = setting.size(1024, 16), setting.size(VOCABULARY, 64)
    changes = TINY_MODEL if setting.tiny else {}
    torch.manual_seed(0)
    with torch.device(setting.device):
        decoder: Any = build_model(build_config({"preset": preset} | changes, vocabulary, 0))
        head = PrototypeHead(decoder.config.n_embd, setting.size(16384, 128), 16)
    head.reset_parameters()
    model = PrismForCausalLM(decoder, head, position_share=0.25).to(setting.device).train()
    groups = [list(decoder.parameters()), list(head.parameters())]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, fused=True)
    shape = (setting.size(rows, 2), length)
    ids = torch.randint(vocabulary, shape, device=setting.device)

    def step(placed: bool) -> Callable[[], None]:
        def run() -> None:
            model.initialised = placed
            model.step += 1
            with autocast(setting.device, "bfloat16"):
                loss = model(ids, labels=ids).loss
            loss.backward()
            for group in groups:
                nn.utils.clip_grad_norm_(group, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return run

    forms = {"without": step(False), "with": step(True)}
    turns = in_turns(forms, setting.size(rounds, 1), setting.device)
    return {
        "preset": preset,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "tokens": ids.numel(),
        "prototypes": head.num_prototypes,
        "milliseconds": milliseconds(turns),
        "ratio": ratios(turns.elapsed["with"], turns.elapsed["without"]),
        "waits": {name: waits(form, setting.device) for name, form in forms.items()},
    }


def waits(form: Callable[[], object], device: str) -> int:
    """Return how often the processor waits for the GPU; on a CPU, how often it would."""
    return _counted(form, device) - _counted(lambda: None, device)


def _counted(form: Callable[[], object], device: str) -> int:
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds) as seen:
        form()
    names = WAITS if device == "cuda" else LOOKS
    return sum(event.count for event in seen.key_averages() if event.key in names)


# -- commands


def command(*words: object) -> None:
    """Run a command of prismlm in this process; what fails is not timed."""
    from prismlm.cli.app import main

    sys.argv = ["prismlm", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"prismlm {words[0]} ended with {end.code}") from end


def training(setting: Setting) -> Figures:
    """Count how often a step of ``prismlm train`` waits for the GPU, without its first and last.

    Leaves the model and its corpus for :func:`index`.
    """
    import pyarrow.parquet as pq

    from prismlm.corpus import sample_path

    texts = setting.work / "texts.jsonl"
    rows = pq.read_table(sample_path()).slice(0, setting.size(1500, 60)).to_pylist()
    texts.write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows))
    corpus = setting.work / "corpus"
    command("corpus", "build", texts, "--out", corpus, "--vocab-size", setting.size(16384, 400))
    few, many = setting.size(2, 1), setting.size(6, 2)
    counts: dict[int, int] = {}
    for steps in (few, many):
        values: Figures = {
            "corpus": corpus,
            "out": setting.work / f"model-{steps}",
            "steps": steps,
            "head.initialise": "random",
            "head.initialise_at_step": 0,
            "gradient_accumulation": 1,
            "evaluation.final_tokens": 1000,
            "checkpoint.every": steps,
            "logging.tensorboard": "false",
        }
        if setting.tiny:
            values |= {f"model.{key}": value for key, value in TINY_MODEL.items()}
            values |= {"head.prototypes": 64, "data.length": 32, "batch_size": 2}
            values |= {"device": "cpu", "precision": "float32"}
        changed = [f"--set={key}={value}" for key, value in values.items()]
        run = lambda changed=changed: command("train", RECIPE, *changed)  # noqa: E731
        counts[steps] = waits(run, setting.device)
    (setting.work / f"model-{many}").rename(setting.work / "model")
    waited = (counts[many] - counts[few]) / (many - few)
    return {"waits_of_a_step": round(waited, 2), "steps": [few, many]}


def index(setting: Setting) -> Figures:
    """Time ``prismlm index`` on what :func:`training` left, beside bare passes of the model.

    States a second: those of a large split less those of a small one, over the difference of their
    times. The passes are as long as those of the index, and have as many positions.
    """
    model, corpus = setting.work / "model", setting.work / "corpus"
    states: dict[str, int] = {}
    seconds: dict[str, float] = {}
    window = setting.size(256, 32)
    # What is imported and compiled once is done when the first has been indexed.
    for split in ("heldout", "heldout", "train"):
        words = ["index", model, "--corpus", corpus, "--split", split, "--lens", split]
        began = time.perf_counter()
        command(*words, "--window", window, "--overwrite")
        seconds[split] = time.perf_counter() - began
        states[split] = read_json(model / "lens" / split / "meta.json")["tokens"]
    plain: Any = GPT2LMHeadModel.from_pretrained(model).eval()
    decoder = plain.to(setting.device).base_model
    shape = (setting.size(16384, 512) // window, window)
    ids = torch.randint(400, shape, device=setting.device)
    with torch.inference_mode(), autocast(setting.device, "bfloat16"):
        forms = {"pass": lambda: decoder(ids, use_cache=False)}
        turns = in_turns(forms, setting.size(ROUNDS, 1), setting.device)
    more = states["train"] - states["heldout"]
    return {
        "states": states,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "states_a_second": round(more / (seconds["train"] - seconds["heldout"])),
        "positions_a_second_of_bare_passes": round(1e3 * ids.numel() / milliseconds(turns)["pass"]),
    }


# -- parts

SMALL_FEEDBACK = (
    "--width=32 --layers=1 --vocabulary=64 --batch=2 --length=16 --prompt=4 --tokens=4 --rounds=2"
)
FEEDBACK = "--batch 8 --length 1024 --tokens 200 --rounds 9"


def script(module: str, words: str, small: str) -> Callable[[Setting], Figures]:
    """Return a part that runs another script and returns what this writes."""

    def run(setting: Setting) -> Figures:
        out = setting.work / "script.json"
        chosen = (small if setting.tiny else words).split()
        sys.argv = [module, "--device", setting.device, "--out", str(out), *chosen]
        importlib.import_module(f"benchmarks.{module}").main()
        return read_json(out)

    return run


PARTS: dict[str, Callable[[Setting], Figures]] = {
    "head, gpt2-small": lambda setting: head_in_model(setting, "gpt2-small", 16, 15),
    "head, gpt2-xl": lambda setting: head_in_model(setting, "gpt2-xl", 4, 12),
    "mixer": script(
        "prototype_mixer.timing",
        "--parts mixer step --dtypes bfloat16 --rounds 7",
        "--parts mixer step --quick --rounds 1 --threads 1",
    ),
    "feedback": script(
        "uncertainty_feedback.overhead", f"--rows 64 {FEEDBACK}", f"--rows 4 {SMALL_FEEDBACK}"
    ),
    "training": training,
    "index": index,
}


def main() -> None:
    """Run a part and write its figures, or note why there are none."""
    parser = script_options(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--failed", metavar="WHY", help="only note that the part failed")
    args = parser.parse_args()
    # What `training` leaves here `index` reads.
    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting("cpu" if args.tiny else "cuda", args.tiny, work)
    began = time.monotonic()
    row: Figures = {"failed": args.failed}
    if not args.failed:
        row = {"figures": PARTS[args.part](setting)}
        row |= {"environment": environment(setting.device)}
    row["seconds"] = round(time.monotonic() - began, 1)
    path = args.out / "gpu.json"
    result = read_json(path) if path.is_file() else {"parts": {}}
    write_json(path, {"parts": result["parts"] | {args.part: row}})


if __name__ == "__main__":
    main()
