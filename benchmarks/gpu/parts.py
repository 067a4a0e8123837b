"""The parts of ``timing.py`` that are no scripts of their own."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.prototype_mixer.timing_forms import autocast
from benchmarks.shared.turns import in_turns, milliseconds, ratios
from prismlm.files import read_json
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_mixer import prefix_mean
from prismlm.training.model import divergence

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

    def drawn(self, *shape: int, alike: bool = False) -> Tensor:
        """Return normal numbers, or rows that are nearly one."""
        x = torch.randn(*shape, device=self.device)
        return 1 + 1e-3 * x if alike else x

    def clock(self, forms: dict[str, Callable[[], Any]]) -> Figures:
        """Return the milliseconds of each form, in turns."""
        return milliseconds(in_turns(forms, self.size(ROUNDS, 1), self.device))


# -- what the operations rest on


def checks(setting: Setting) -> Figures:
    """Time what the choice of the operations rests on; milliseconds, but where it says otherwise.

    Of a part that fails on this device, why.
    """
    found: Figures = {}
    for part in (launches, products, heads, divergences, decoding, gated):
        try:
            found[part.__name__] = part(setting)
        except Exception as error:
            found[part.__name__] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def launches(setting: Setting) -> Figures:
    """Time a thousand small operations, and three hundred with their gradients."""
    one, leaf = torch.zeros(8, device=setting.device), torch.zeros(8, device=setting.device)
    leaf.requires_grad_()

    def forward() -> None:
        for _ in range(1000):
            one.add_(1)

    def with_gradient() -> None:
        x = leaf
        for _ in range(300):
            x = x * 1.0
        x.sum().backward()

    return setting.clock({"1,000 operations": forward, "300, and 300 of gradients": with_gradient})


def products(setting: Setting) -> Figures:
    """Time the product that chooses in each precision, and what is made of its scores."""
    n, width, count = (setting.size(*s) for s in ((16384, 64), (768, 32), (16384, 256)))
    z, bank = setting.drawn(n, width), setting.drawn(count, width)
    found: Figures = {}
    for name, dtype in (
        ("float32", torch.float32),
        ("TF32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ):
        torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        left, right = z.to(dtype), bank.to(dtype)
        scores = left[: n // 2] @ right.T
        forms: dict[str, Callable[[], Any]] = {
            "product": lambda left=left, right=right: left @ right.T,
            "24 largest of half the rows": lambda scores=scores: scores.topk(24, sorted=False),
            "best of each column": lambda scores=scores: scores.max(0),
        }
        found[name] = setting.clock(forms)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def routed_step(z: Tensor, prototypes: Tensor, scale: Tensor, k: int) -> None:
    """Run the losses and their backward pass through the chosen pairs."""
    routing = ops.route(z, prototypes, k, scale)
    rebuilt = ops.reconstruct(routing, prototypes)
    loss = ops.prototype_pull(routing) + ops.point_pull(routing) + ops.residual(z, rebuilt)
    loss.backward()


def dense_step(z: Tensor, prototypes: Tensor, scale: Tensor, k: int) -> None:
    """Run the same with all cosines in the graph."""
    cosines = F.normalize(z) @ F.normalize(prototypes).T
    top, indices = cosines.topk(k, dim=1)
    weights = torch.relu(scale * top)
    rebuilt = F.embedding_bag(indices, prototypes, per_sample_weights=weights, mode="sum")
    loss = (z - rebuilt).square().mean() - cosines.amax(0).mean() - cosines.amax(1).mean()
    loss.backward()


def heads(setting: Setting) -> Figures:
    """Time a step of the head beside one with all cosines under autograd."""
    width, count = setting.size(768, 32), setting.size(16384, 256)
    few, many = setting.size(4096, 32), setting.size(16384, 64)
    steps, found = {"route": routed_step, "dense": dense_step}, Figures()
    for name, n, k, alike in (
        (f"{few} states, k 32", few, 32, False),
        (f"{few} states that are alike, k 16", few, 16, True),
        (f"{many} states, k 32", many, 32, False),
        (f"{many} states, k 128", many, 128, False),
    ):
        z = setting.drawn(n, width, alike=alike).requires_grad_()
        bank = setting.drawn(count, width, alike=alike).requires_grad_()
        scale = torch.ones((), device=setting.device, requires_grad=True)
        forms = {form: partial(step, z, bank, scale, k) for form, step in steps.items()}
        found[name] = setting.clock(forms)
    return found


def divergences(setting: Setting) -> Figures:
    """Time the loss of what prototypes alone predict over all tokens, and over a sample."""
    n, width = setting.size(4096, 16), setting.size(768, 32)
    vocabulary, sample = setting.size(VOCABULARY, 200), setting.size(8192, 50)
    weight = setting.drawn(vocabulary, width).bfloat16() * 0.02
    z = setting.drawn(n, width)
    rebuilt = (0.9 * z).requires_grad_()

    def step(rows: Tensor) -> None:
        target, logits = (F.linear(x.bfloat16(), rows) for x in (z, rebuilt))
        divergence(target, logits).mean().backward()

    few = weight[:sample].contiguous()
    return setting.clock({"all tokens": lambda: step(weight), "a sample": lambda: step(few)})


def decoding(setting: Setting) -> Figures:
    """Time a token after a growing number of others, with and without cuDNN's attention."""
    config = GPT2Config(n_layer=3, n_embd=160, n_head=5, vocab_size=256)
    model: Any = GPT2LMHeadModel(config).eval()
    model.to(setting.device, torch.bfloat16)
    ids, found = torch.zeros(1, setting.size(300, 8), dtype=torch.long, device=setting.device), {}
    for name, on in (("without cuDNN", False), ("with cuDNN", True)):
        torch.backends.cuda.enable_cudnn_sdp(on)
        with torch.inference_mode():
            cache: Any = model(ids, use_cache=True).past_key_values
            given = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": True}
            found |= setting.clock({name: partial(model, **given)})
    return found


def gated(setting: Setting) -> Figures:
    """Time the prefix mean beside flash-linear-attention's kernel, and say how far they differ."""
    if importlib.util.find_spec("fla") is None:
        return {"skipped": "fla-core is not installed"}
    chunk_gla = importlib.import_module("fla.ops.gla").chunk_gla
    found: Figures = {}
    for rows, length in ((64, 256), (4, 4096), (1, 16384)):
        rows, length = setting.size(rows, 1), setting.size(length, 64)
        given = [setting.drawn(rows, length, size) for size in (32, 32, 128)]
        given = [F.softplus(given[0]), given[1].softmax(-1), given[2]]
        decay = torch.linspace(0.05, 0.999, 32, device=setting.device)
        leaves = [x.requires_grad_() for x in (*given, decay)]

        def own(leaves: list[Tensor] = leaves) -> Tensor:
            return prefix_mean(leaves[0], leaves[1], leaves[2], leaves[3])[0]

        def kernel(leaves: list[Tensor] = leaves) -> Tensor:
            return gated_mean(chunk_gla, *leaves)

        with torch.no_grad():
            error = float((own() - kernel()).norm() / own().norm())
        forms = {
            "prefix mean": lambda own=own: own().square().mean().backward(),
            "chunk_gla": lambda kernel=kernel: kernel().square().mean().backward(),
        }
        found[str(length)] = setting.clock(forms) | {"difference": error}
    return found


def gated_mean(
    chunk_gla: Callable[..., Any], write: Tensor, read: Tensor, values: Tensor, decay: Tensor
) -> Tensor:
    """Return the prefix mean as gated linear attention in bf16.

    The kernel's S_i = β S_{i−1} + k_i v_iᵀ holds position i itself, so keys and values come one
    late; the factor β that this leaves out is in the mass too. Its sums are made by doubling:
    after step s a position holds those of the 2s positions before it.
    """
    keys, late = (F.pad(x, (0, 0, 1, -1)) for x in (write, values))
    mass, step = keys, 1
    while step < keys.shape[1]:
        mass = mass + decay**step * F.pad(mass, (0, 0, step, -step))
        step *= 2
    queries = torch.where(mass > 0, read / mass.clamp_min(1e-30), 0.0)
    gates = decay.log().expand_as(keys)
    one = (x.bfloat16().unsqueeze(2) for x in (queries, keys, late))
    return chunk_gla(*one, gates.unsqueeze(2), scale=1.0)[0].squeeze(2).float()


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
        "peak_mib": {name: round(cost.mib) for name, cost in turns.first.items()},
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


def head_compiled(setting: Setting) -> Figures:
    """Time a head's losses and gradients as they are, compiled, and as a CUDA graph."""
    n, width, count = (setting.size(*s) for s in ((4096, 32), (768, 32), (16384, 128)))
    head = PrototypeHead(width, count, 16).to(setting.device)
    head.reset_parameters()
    z = setting.drawn(n, width).requires_grad_()

    def losses(z: Tensor) -> Tensor:
        parts = head.losses(z, head(z))
        return torch.stack([part for part in parts if part is not None]).sum()

    backend = "eager" if setting.tiny else "inductor"
    compiled = torch.compile(losses, fullgraph=True, backend=backend)
    began = time.perf_counter()
    compiled(z).backward()
    forms: dict[str, Callable[[], Any]] = {
        "as it is": lambda: losses(z).backward(),
        "compiled": lambda: compiled(z).backward(),
    }
    found: Figures = {"seconds_to_compile": round(time.perf_counter() - began, 1)}
    if setting.device == "cuda":
        forms["CUDA graph"] = captured(lambda: losses(z).backward(), [z, *head.parameters()])
    else:
        found["skipped"] = "CUDA graph: there is no GPU"
    turns = in_turns(forms, setting.size(20, 1), setting.device)
    return found | {
        "milliseconds": milliseconds(turns),
        "ratios": {
            name: ratios(turns.elapsed[name], turns.elapsed["as it is"])
            for name in forms
            if name != "as it is"
        },
        "waits": waits(forms["as it is"], setting.device),
    }


def captured(step: Callable[[], None], leaves: list[Tensor]) -> Callable[[], None]:
    """Return the replay of a step's CUDA graph, whose gradients stay in its own memory."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


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
        bare = setting.clock({"pass": lambda: decoder(ids, use_cache=False)})["pass"]
    more = states["train"] - states["heldout"]
    return {
        "states": states,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "states_a_second": round(more / (seconds["train"] - seconds["heldout"])),
        "positions_a_second_of_bare_passes": round(1e3 * ids.numel() / bare),
    }
