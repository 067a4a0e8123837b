"""What uncertainty feedback costs beside the same model without it.

    python -m benchmarks.uncertainty_feedback.overhead --threads 1 --batch 2 --length 512
    python -m benchmarks.uncertainty_feedback.overhead --device cuda --length 1024 \\
        --batch 8 --large-batch 32

GPT-2 small with 65,536 levels, unless sizes say otherwise. Both have the same random weights, and
take turns in one run: at every token in decoding, where the model without feedback is also timed
against itself. Writes docs/results/uncertainty_overhead.json, or uncertainty_overhead_cuda.json
from a GPU; the page is ``uncertainty_feedback``.

The optimizer goes over the whole table in every step, whose share of the time falls with the
tokens of the step: steps of ``--batch`` and of ``--large-batch`` rows are timed. What one pass adds
to such a step is also timed by itself, in turn with the steps: it is shorter than what a step's
time varies by. Shares of floating point operations are counted for ``--count-tokens`` in a step.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.turns import Turns, in_turns, ratios
from prismlm.files import write_json
from prismlm.models.uncertainty_feedback import (
    UncertaintyFeedback,
    attach_uncertainty,
    uncertainty_of,
)
from prismlm.ops.uncertainty_feedback import NO_CODE, neutral_code

PLAIN, ONE, TWO = "no feedback", "one pass", "two passes"
AGAIN, ADDED = "no feedback, again", "what one pass adds, alone"
RATE = 1e-4
# Of one logit: maximum, difference, exponential, sum; logarithm, product and sum of Σ P ln P.
PER_LOGIT = 7
# Of one parameter: two moments, their corrections, root, quotient and step; and clipping.
PER_OPTIMISED = 14
SHAPE = ("batch", "large_batch", "length", "prompt", "tokens", "rounds")
Figures = dict[str, Any]


def main() -> None:
    """Time, count and write."""
    given = arguments()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    plain, fed = pair(given)
    table = feedback_of(fed).embedding.weight
    ids = torch.randint(given.vocabulary, (given.batch, given.length), device=given.device)
    more = torch.randint(given.vocabulary, (given.large_batch, given.length), device=given.device)
    timed = {
        "decode": decode(plain, fed, ids[:1, : given.prompt], given),
        "prefill": prefill(plain, fed, ids, given),
        "step": step(plain, fed, ids, given, (PLAIN, ONE, TWO, ADDED)),
        "large step": step(plain, fed, more, given, (PLAIN, ONE, ADDED)),
    }
    where = environment()
    if given.device == "cuda":
        where["machine"] = torch.cuda.get_device_name()
    result = {
        "model": {
            "width": given.width,
            "layers": given.layers,
            "vocabulary": given.vocabulary,
            "parameters": sum(p.numel() for p in plain.parameters()),
            "levels": given.levels,
            "table": table.numel(),
        },
        "shape": {name: getattr(given, name) for name in SHAPE},
        "timed": {part: figures["ratios"] for part, figures in timed.items()},
        "milliseconds": {part: figures["milliseconds"] for part, figures in timed.items()},
        "peak_mib": {part: figures["peak_mib"] for part, figures in timed.items()},
        "memory": timed["step"]["memory"],
        "counted": counted(plain, table, given),
        "environment": where,
    }
    write_json(given.out, result)
    show(result, given.out)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = script_options(__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--levels", type=int, default=65536)
    parser.add_argument("--rows", type=int, help="of the table, interpolated; else one a level")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step and a prefill")
    parser.add_argument("--large-batch", type=int, default=8, help="rows of a larger step")
    parser.add_argument("--length", type=int, default=256, help="tokens of such a row")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the decoded ones")
    parser.add_argument("--tokens", type=int, default=600, help="decoded, each a round")
    parser.add_argument("--count-tokens", type=int, default=8192, help="of a step, for the counts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not 1 <= given.prompt <= given.length:
        parser.error(f"a prompt of {given.prompt} tokens: expected 1 to {given.length}, the length")
    if given.out is None:
        kind = "_cuda" if given.device == "cuda" else ""
        given.out = RESULTS / f"uncertainty_overhead{kind}.json"
    return given


def pair(given: argparse.Namespace) -> tuple[GPT2LMHeadModel, GPT2LMHeadModel]:
    """Return a model, and one of the same parameters with feedback."""
    config = GPT2Config(
        vocab_size=given.vocabulary,
        n_embd=given.width,
        n_layer=given.layers,
        n_head=max(1, given.width // 64),
        n_positions=max(1024, given.length, given.prompt + given.tokens + 1),
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    plain = GPT2LMHeadModel(config).to(given.device)
    shared: dict[int, Any] = {id(parameter): parameter for parameter in plain.parameters()}
    fed = copy.deepcopy(plain, shared)
    attach_uncertainty(fed, given.levels, rows=given.rows, deviation=None, passes=1)
    return plain, fed


def feedback_of(model: nn.Module) -> UncertaintyFeedback:
    """Return the feedback that stands in a model."""
    found = uncertainty_of(model)
    assert found is not None
    return found


@torch.no_grad()
def decode(plain: nn.Module, fed: nn.Module, prompt: Tensor, given: argparse.Namespace) -> Figures:
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

    forms = {PLAIN: decoding(plain), AGAIN: decoding(plain), ONE: decoding(fed)}
    return figures_of(in_turns(forms, given.tokens, given.device))


@torch.no_grad()
def prefill(plain: nn.Module, fed: nn.Module, ids: Tensor, given: argparse.Namespace) -> Figures:
    """Time a pass over whole rows without a cache."""

    def over(model: Any, passes: int) -> Callable[[], None]:
        model.eval()

        def run() -> None:
            if model is fed:
                feedback_of(model).passes = passes
            model(ids, use_cache=False)

        return run

    forms = {PLAIN: over(plain, 1), ONE: over(fed, 1), TWO: over(fed, 2)}
    return figures_of(in_turns(forms, given.rounds, given.device))


def step(
    plain: nn.Module, fed: nn.Module, ids: Tensor, given: argparse.Namespace, names: tuple[str, ...]
) -> Figures:
    """Time a training step: loss, backward pass, clipping and AdamW, of the table too."""
    feedback = feedback_of(fed)
    # Fused, as the training of this package has it.
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

    forms = {
        PLAIN: training(plain, 1),
        ONE: training(fed, 1),
        TWO: training(fed, 2),
        ADDED: addition(feedback, table_optimizer, ids, given),
    }
    chosen = {name: forms[name] for name in names}
    # What AdamW keeps is made in the first step, and is no part of another's peak.
    for form in chosen.values():
        form()
    turns = in_turns(chosen, given.rounds, given.device)
    held = {
        "model": held_bytes(plain, model_optimizer),
        "table": held_bytes(feedback.embedding, table_optimizer),
    }
    return figures_of(turns) | {"memory": held}


def update(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients, take a step and forget them."""
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def addition(
    feedback: UncertaintyFeedback,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    given: argparse.Namespace,
) -> Callable[[], None]:
    """Return what one pass adds to a step, but for what its hooks read of the call.

    The vectors of the codes, their gradient, and clipping and AdamW of the table.
    """
    beside = torch.zeros(*ids.shape, given.width, device=given.device, requires_grad=True)
    gradient = torch.ones_like(beside)

    def run() -> None:
        codes = torch.full_like(ids, neutral_code(given.levels))
        codes[:, 0] = NO_CODE
        (beside + feedback.embedding(codes)).backward(gradient)
        update(feedback.embedding, optimizer)

    return run


def held_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> Figures:
    """Return the bytes of weights, of gradients as large, and of what AdamW keeps."""
    weights = sum(p.nbytes for p in module.parameters())
    state = sum(
        value.nbytes
        for p in module.parameters()
        for value in optimizer.state[p].values()
        if value.ndim
    )
    return {"weights": weights, "gradients": weights, "optimizer": state}


def figures_of(turns: Turns) -> Figures:
    """Return every form's time over that without feedback: the median over rounds, its interval."""
    clocks = {"elapsed": turns.elapsed, "processor": turns.processor}
    return {
        "ratios": {
            name: {clock: ratios(found[name], found[PLAIN]) for clock, found in clocks.items()}
            for name in turns.elapsed
            if name != PLAIN and PLAIN in turns.elapsed
        },
        "milliseconds": {
            name: round(1e3 * float(np.median(found)), 3) for name, found in turns.elapsed.items()
        },
        "peak_mib": {name: round(cost.mib, 1) for name, cost in turns.first.items()},
    }


def counted(model: GPT2LMHeadModel, table: Tensor, given: argparse.Namespace) -> Figures:
    """Return floating point operations of feedback as shares of those of the model, on paper.

        decoding   (7 V + d) / (2 N + 4 L t d)
        one pass   (2 d + 14 U / B) / (6 N + 12 L T d)
        two passes (2 N + 4 L T d + 7 V) more in the numerator

    N entries of matrices, U of the table, t positions seen, T of a row, B tokens of a step. With
    one pass no entropy is computed in training.
    """
    width, vocabulary = given.width, given.vocabulary
    multiplied = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    entropy = PER_LOGIT * vocabulary
    reach = given.layers * width
    forward = 2 * multiplied + 4 * reach * given.length
    token = 2 * multiplied + 4 * reach * (given.prompt + given.tokens / 2)
    beside = 2 * width + PER_OPTIMISED * table.numel() / given.count_tokens
    return {
        "tokens_of_a_step": given.count_tokens,
        "decode": (entropy + width) / token,
        "one_pass": beside / (3 * forward),
        "two_passes": (beside + forward + entropy) / (3 * forward),
    }


def show(result: Figures, out: Path) -> None:
    """Print the ratios and where they were measured."""
    for part, forms in result["timed"].items():
        for name, clocks in forms.items():
            found = clocks["elapsed"]
            print(
                f"{part}, {name}: {found['ratio']:.4f} × {PLAIN} "
                f"({found['low']:.4f} to {found['high']:.4f})"
            )
    memory = result["memory"]
    table, model = (sum(memory[name].values()) / 2**20 for name in ("table", "model"))
    print(f"table with gradient and AdamW: {table:,.0f} MiB beside {model:,.0f} MiB")
    where = result["environment"]
    versions = ", ".join(f"{k} {where[k]}" for k in ("python", "torch", "transformers", "prismlm"))
    print(f"{where['machine']}, {where['cores']} cores; {versions}; wrote {out}")


if __name__ == "__main__":
    main()
