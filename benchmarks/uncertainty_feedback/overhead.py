"""What uncertainty feedback costs: time over that of the same model without it.

    python -m benchmarks.uncertainty_feedback.overhead --threads 1 --batch 2 --length 512
    python -m benchmarks.uncertainty_feedback.overhead --device cuda --batch 8 --length 1024 \\
        --out docs/results/uncertainty_overhead_cuda.json
    python -m benchmarks.render uncertainty_feedback

GPT-2 small with 65,536 levels, unless sizes say otherwise. Both models have the same random weights
and take turns in one run: at every token in decoding.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, add_numbers, script_options
from benchmarks.shared.turns import Turns, against, in_turns, milliseconds
from prismlm.files import write_json
from prismlm.models.uncertainty_feedback import (
    UncertaintyFeedback,
    attach_uncertainty,
    uncertainty_of,
)

PLAIN, ONE, TWO = "no feedback", "one pass", "two passes"
RATE = 1e-4
SHAPE = ("batch", "length", "prompt", "tokens", "rounds")
Figures = dict[str, Any]


def main() -> None:
    """Time and write."""
    parser = script_options(__doc__, RESULTS / "uncertainty_overhead.json")
    add_numbers(parser, width=768, layers=12, vocabulary=50257, levels=65536)
    parser.add_argument("--rows", type=int, help="of the table, interpolated; default: one a level")
    # Rows of a step and of a prefill and their tokens; those before the decoded ones, and these.
    add_numbers(parser, batch=1, length=256, prompt=64, tokens=600, rounds=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    plain, fed = pair(args)
    ids = torch.randint(args.vocabulary, (args.batch, args.length), device=args.device)
    turns = {
        "decode": decode(plain, fed, ids[:1, : args.prompt], args),
        "prefill": prefill(plain, fed, ids, args),
        "step": step(plain, fed, ids, args),
    }
    model = {name: getattr(args, name) for name in ("width", "layers", "vocabulary", "levels")}
    model["parameters"] = sum(p.numel() for p in plain.parameters())
    model["table"] = feedback_of(fed).embedding.weight.numel()
    result = {
        "model": model,
        "shape": {name: getattr(args, name) for name in SHAPE},
        "timed": {
            part: {name: {"elapsed": ratio} for name, ratio in against(turn, PLAIN).items()}
            for part, turn in turns.items()
        },
        "milliseconds": {part: milliseconds(turn) for part, turn in turns.items()},
        "environment": environment(args.device),
    }
    write_json(args.out, result)
    for part, forms in result["timed"].items():
        print(part, {name: clocks["elapsed"] for name, clocks in forms.items()})


def pair(args: argparse.Namespace) -> tuple[GPT2LMHeadModel, GPT2LMHeadModel]:
    """Return a model, and one of the same parameters with feedback."""
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=max(1, args.width // 64),
        n_positions=max(1024, args.length, args.prompt + args.tokens + 1),
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    plain = GPT2LMHeadModel(config).to(args.device)
    shared: dict[int, Any] = {id(parameter): parameter for parameter in plain.parameters()}
    fed = copy.deepcopy(plain, shared)
    attach_uncertainty(fed, args.levels, rows=args.rows, deviation=None, passes=1)
    return plain, fed


def feedback_of(model: nn.Module) -> UncertaintyFeedback:
    """Return a model's feedback."""
    feedback = uncertainty_of(model)
    assert feedback is not None
    return feedback


@torch.no_grad()
def decode(plain: nn.Module, fed: nn.Module, prompt: Tensor, args: argparse.Namespace) -> Turns:
    """Time tokens decoded one by one after a prompt, whose pass is not counted."""

    def decoding(model: Any) -> Callable[[], None]:
        model.eval()
        cache = model(prompt, use_cache=True).past_key_values
        token = prompt[:, -1:]

        def run() -> None:
            nonlocal token
            output = model(token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)

        return run

    return in_turns({PLAIN: decoding(plain), ONE: decoding(fed)}, args.tokens, args.device)


@torch.no_grad()
def prefill(plain: nn.Module, fed: nn.Module, ids: Tensor, args: argparse.Namespace) -> Turns:
    """Time a pass over whole rows without a cache."""

    def over(model: Any, passes: int) -> Callable[[], None]:
        model.eval()

        def run() -> None:
            if model is fed:
                feedback_of(model).passes = passes
            model(ids, use_cache=False)

        return run

    forms = {PLAIN: over(plain, 1), ONE: over(fed, 1), TWO: over(fed, 2)}
    return in_turns(forms, args.rounds, args.device)


def step(plain: nn.Module, fed: nn.Module, ids: Tensor, args: argparse.Namespace) -> Turns:
    """Time a training step: loss, backward pass, clipping and AdamW, of the table too."""
    feedback = feedback_of(fed)
    # Fused, as in prismlm's training.
    model_optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, fused=True)
    table_optimizer = torch.optim.AdamW(
        feedback.embedding.parameters(), lr=RATE, weight_decay=0.0, fused=True
    )

    def training(model: Any, passes: int) -> Callable[[], None]:
        def run() -> None:
            model.train()
            if model is fed:
                feedback.passes = passes
            model(ids, labels=ids, use_cache=False).loss.backward()
            update(plain, model_optimizer)
            if model is fed:
                update(feedback.embedding, table_optimizer)

        return run

    forms = {PLAIN: training(plain, 1), ONE: training(fed, 1), TWO: training(fed, 2)}
    return in_turns(forms, args.rounds, args.device)


def update(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients, take a step and forget them."""
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
