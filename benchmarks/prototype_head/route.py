"""Time prototype_head.route beside the bare product, and a step beside autograd through N×K.

    python -m benchmarks.prototype_head.route                  writes docs/results/route.json
    python -m benchmarks.prototype_head.route --quick --out /tmp/route.json
    python -m benchmarks.prototype_head.route --device cuda --out docs/results/route_cuda.json

Forward: ``route`` (indices, cosines, nearest states) against ``z @ P.T`` as written, and against
the same into memory that is already there. Step: route, reconstruct, R1 + R2
+ RES and backward, against the same with all N×K cosines under autograd. Compared things take
turns in one process; a ratio is the median of the ratios of the rounds, of elapsed time and, on a
CPU, of processor time too, which says more when other work runs beside. Memory is the peak over
that before the step: on a CPU of the resident set of a fresh process that has run a tiny step
(Linux only), on a GPU of what is allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shared.environment import ROOT, environment, processor
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import write_json
from prismlm.ops import prototype_head as ops


class Shape(NamedTuple):
    """Sizes of a comparison."""

    states: int
    width: int
    prototypes: int
    per_token: int


TARGET = Shape(8192, 256, 4096, 16)
TRAINING = Shape(1024, 160, 2048, 16)
WIDE = Shape(8192, 256, 16384, 16)
QUICK = Shape(256, 32, 512, 8)
TINY = Shape(32, 256, 64, 16)
ROWS = 1024


def main() -> None:
    """Run the comparisons, print a table and write the figures."""
    parser = script_options(__doc__, RESULTS / "route.json")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="a small shape, to see that it runs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on a CPU")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "SHAPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        form, shape = given.peak
        print(peak_memory(STEPS[form], Shape(*json.loads(shape)), given.device))
        return
    shapes = [TARGET, TRAINING] + ([WIDE] if given.device == "cuda" else [])
    rounds = 2 if given.quick else given.rounds
    print(f"{'what':8} {'shape':25} threads {'dtype':9} {'against':28} ratio    min    max  cpu")
    results: list[dict[str, Any]] = []
    threads = given.threads if given.device == "cpu" else [torch.get_num_threads()]
    load = os.getloadavg()[0]
    for result in measured([QUICK] if given.quick else shapes, rounds, threads, given.device):
        print_rows(result)
        results.append(result)
    loads = {"load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2)}
    where = environment() | machine(given.device) | loads
    write_json(given.out, {"environment": where, "results": results})


def measured(
    shapes: list[Shape], rounds: int, counts: list[int], device: str
) -> Iterator[dict[str, Any]]:
    """Yield every comparison as it is made."""
    for shape in shapes:
        for threads in counts:
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.bfloat16):
                laps = interleaved(forwards(shape, dtype, device), rounds, device)
                yield entry("forward", shape, threads, dtype, laps)
            laps = interleaved(steps(shape, device), rounds, device)
            yield entry("step", shape, threads, torch.float32, laps)
        yield memory(shape, device)


def tensors(shape: Shape, device: str, *, grad: bool) -> tuple[Tensor, Tensor]:
    """Return states and prototypes, normally distributed, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(shape.states, shape.width, generator=generator).to(device)
    prototypes = torch.randn(shape.prototypes, shape.width, generator=generator).to(device)
    return z.requires_grad_(grad), prototypes.requires_grad_(grad)


def forwards(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Callable[[], Any]]:
    """Return the forward forms to compare."""
    z, prototypes = (x.to(dtype) for x in tensors(shape, device, grad=False))
    out = torch.empty(shape.states, shape.prototypes, dtype=dtype, device=device)
    forms: dict[str, Callable[[], Any]] = {
        "route": lambda: ops.route(z, prototypes, shape.per_token, 1.0),
        "product": lambda: z @ prototypes.T,
        "product into memory": lambda: torch.mm(z, prototypes.T, out=out),
    }
    if device == "cuda":
        compiled = torch.compile(chunk)
        forms["compiled chunks"] = lambda: in_chunks(compiled, z, prototypes, shape.per_token)
    return forms


def chunk(z: Tensor, unit_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what is to be kept of a chunk of states."""
    scores = F.normalize(z.float()) @ unit_p.T
    top, best = scores.topk(k, dim=1), scores.max(0)
    return top.values, top.indices, best.values, best.indices


def in_chunks(form: Callable[..., Any], z: Tensor, prototypes: Tensor, k: int) -> Any:
    """Run ``form`` over chunks of states and join what it keeps."""
    unit_p = F.normalize(prototypes.float())
    values, indices, best, row = zip(
        *(form(part, unit_p, k) for part in z.split(ROWS)), strict=True
    )
    top, part = torch.stack(best).max(0)
    state = torch.stack(row).gather(0, part[None])[0] + part * ROWS
    return torch.cat(values), torch.cat(indices), top, state


def sparse_step(z: Tensor, prototypes: Tensor, scale: Tensor, k: int) -> None:
    """Run the losses and their backward pass through the selected pairs."""
    routing = ops.route(z, prototypes, k, scale)
    rebuilt = ops.reconstruct(routing, prototypes)
    loss = ops.prototype_pull(routing) + ops.point_pull(routing) + ops.residual(z, rebuilt)
    loss.backward()


def dense_step(z: Tensor, prototypes: Tensor, scale: Tensor, k: int, *, product: bool) -> None:
    """Run the same with all cosines in the graph.

    The reconstruction is a bag of rows, the quickest there is, or a product with N×K activations.
    """
    cosines = F.normalize(z) @ F.normalize(prototypes).T
    top, indices = cosines.topk(k, dim=1)
    activations = torch.relu(scale * top)
    if product:
        rebuilt = torch.zeros_like(cosines).scatter(1, indices, activations) @ prototypes
    else:
        rebuilt = F.embedding_bag(indices, prototypes, per_sample_weights=activations, mode="sum")
    loss = (z - rebuilt).square().mean() - cosines.amax(0).mean() - cosines.amax(1).mean()
    loss.backward()


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, int], None]] = {
    "route": sparse_step,
    "dense": lambda *given: dense_step(*given, product=False),
    "dense with a second product": lambda *given: dense_step(*given, product=True),
}


def steps(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """Return the training steps to compare."""
    return {name: bound_step(step, shape, device) for name, step in STEPS.items()}


def bound_step(step: Callable[..., None], shape: Shape, device: str) -> Callable[[], None]:
    """Return a step with inputs of its own, whose gradients are dropped before it runs."""
    z, prototypes = tensors(shape, device, grad=True)
    scale = torch.ones((), device=device, requires_grad=True)

    def run() -> None:
        z.grad = prototypes.grad = scale.grad = None
        step(z, prototypes, scale, shape.per_token)

    return run


class Laps(NamedTuple):
    """Seconds of every form in every round."""

    elapsed: dict[str, list[float]]
    processor: dict[str, list[float]]


def interleaved(forms: dict[str, Callable[[], Any]], rounds: int, device: str) -> Laps:
    """Time every form in every round; they take turns within a round."""
    laps = Laps({name: [] for name in forms}, {name: [] for name in forms})
    for lap in range(rounds + 1):
        for name, form in forms.items():
            elapsed, processor = time.perf_counter(), time.process_time()
            form()
            if device == "cuda":
                torch.cuda.synchronize()
            if lap:  # the first is a warm-up
                laps.elapsed[name].append(time.perf_counter() - elapsed)
                laps.processor[name].append(time.process_time() - processor)
    return laps


def entry(what: str, shape: Shape, threads: int, dtype: torch.dtype, laps: Laps) -> dict[str, Any]:
    """Return the times and their ratios: route over product, but dense over route."""

    def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, others in seconds.items():
            if name != "route":
                pairs = zip(seconds["route"], others, strict=True)
                found[name] = spread([a / b if what == "forward" else b / a for a, b in pairs])
        return found

    return {
        "what": what,
        "shape": shape._asdict(),
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "milliseconds": {k: spread([1e3 * s for s in v]) for k, v in laps.elapsed.items()},
        "ratios": ratios(laps.elapsed),
        "processor_ratios": ratios(laps.processor),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and largest."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return {"median": round(middle, 3), "min": round(low, 3), "max": round(high, 3)}


def memory(shape: Shape, device: str) -> dict[str, Any]:
    """Return the peak memory of every step, each measured three times.

    On a CPU each in a process of its own: a GPU's allocator counts what is in use.
    """
    mib: dict[str, dict[str, float]] = {}
    for name in STEPS:
        command = [sys.executable, "-m", "benchmarks.prototype_head.route", "--device", device]
        command += ["--peak", name, json.dumps(shape)]
        laps = [
            peak_memory(STEPS[name], shape, device)
            if device == "cuda"
            else float(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
            for _ in range(3)
        ]
        mib[name] = spread(laps)
    ratios = {
        name: {
            "median": round(peak["median"] / mib["route"]["median"], 3),
            "min": round(peak["min"] / mib["route"]["max"], 3),
            "max": round(peak["max"] / mib["route"]["min"], 3),
        }
        for name, peak in mib.items()
        if name != "route"
    }
    return {"what": "memory", "shape": shape._asdict(), "mebibytes": mib, "ratios": ratios}


def peak_memory(step: Callable[..., None], shape: Shape, device: str) -> float:
    """Return the MiB that a step needs at most beyond its inputs; on a CPU of a fresh process."""
    torch.set_num_threads(1)
    run = bound_step(step, shape, device)
    bound_step(step, TINY, device)()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    run()
    return (resident("VmHWM") - before) / 1024


def resident(key: str) -> int:
    """Return a KiB figure of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def print_rows(result: dict[str, Any]) -> None:
    """Print a line per comparison."""
    shape = "N={} d={} K={} k={}".format(*result["shape"].values())
    cpu = result.get("processor_ratios")
    for name, ratio in result["ratios"].items():
        print(
            f"{result['what']:8} {shape:25} {result.get('threads', ''):>7} "
            f"{result.get('dtype', ''):9} {name:28} "
            f"{ratio['median']:6.2f} {ratio['min']:6.2f} {ratio['max']:6.2f}"
            + (f" {cpu[name]['median']:6.2f}" if cpu else ""),
            flush=True,
        )


def machine(device: str) -> dict[str, Any]:
    """Return which processor or GPU it ran on."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} × {processor()}"
        if device == "cpu"
        else torch.cuda.get_device_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    main()
