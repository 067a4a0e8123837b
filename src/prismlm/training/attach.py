"""Attaching a prototype head to an existing model, whose weights stay unchanged."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus import build_corpus, estimate_build
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer, check_tokenizer_of
from prismlm.corpus.windows import split_counts
from prismlm.cost import Cost, peak_memory, seconds_of
from prismlm.errors import InputError, check_number
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import WAY_OUT, check_room, keep_json, read_json, room_to_write
from prismlm.layers import PrototypeHead
from prismlm.lens import scan
from prismlm.lens.build import IndexOptions, build_index, check_index, index_bytes, options_for
from prismlm.lens.cell_files import cells_format
from prismlm.lens.cells import CodeName
from prismlm.lens.labels.write import label_lens
from prismlm.lens.layout import read_meta
from prismlm.lens.lens import Lens
from prismlm.lens.options import Shard
from prismlm.lens.scan import (
    HiddenStates,
    bytes_per_position,
    join_states,
    pass_tokens,
    read_states,
)
from prismlm.models.base import CONFIG_FILE, BaseCheckpoint, find_base, put_adapted, put_base
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import BALANCED, device_named, uses_bf16
from prismlm.models.seam import LogitMap, capture, verify_logit_map
from prismlm.models.sidecar import (
    META_FILE,
    Sidecar,
    base_of,
    has_sidecar,
    load_sidecar,
    save_sidecar,
    weight_of,
)
from prismlm.models.uncertainty_feedback import has_uncertainty, save_uncertainty, uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import check_same, keeping, read_note, writing
from prismlm.training import parallel, tuning
from prismlm.training.evaluation import HeldOut
from prismlm.training.fit import FitOptions, Fitting, fit
from prismlm.training.recipe import flat
from prismlm.training.run import check_ours
from prismlm.training.setup import versions
from prismlm.training.trainer import write_history
from prismlm.training.tuning import ADAPTER, LoraOptions, TableOptions

ATTACH_FILE, EFFECT_FILE = "attach.json", "uncertainty_feedback.json"
CORPORA = "corpora"
# A directory that is removed at the end, with hidden states and the model before fine-tuning.
WORK, STATES, BASE = "attach", "states", "base"

# Options that may change when the command is run again, since they do not affect results.
FREE_TO_CHANGE = ("keep_states", "device", "revision", "skip_bad_rows")
MEASURED_STEPS = 3
# Tokens read per token of text: windows overlap by a quarter.
OVERLAP_FACTOR = 4 / 3
# Time of a training step relative to a forward pass.
TRAINING_FACTOR = 3


@dataclass(frozen=True)
class AttachOptions:
    """How a head is attached."""

    fit: FitOptions = field(default_factory=FitOptions)
    window: int | None = None  # tokens read at once; by default 512, or the model's maximum
    states_gb: float = 4.0  # disk space for hidden states, of an even sample if it is too small
    keep_states: bool = False  # keep hidden states at the end, to fit another head
    contexts: int = 64  # L, contexts stored per prototype in the lens
    positions: float = 1.0  # fraction of the positions in the cells of the lens
    codes: CodeName = "int8"  # format of the states in the cells
    heldout_tokens: int = 20_000  # tokens that the head is evaluated on
    device: str = "auto"
    precision: str = "auto"  # of forward passes: auto, float32 or bf16
    revision: str | None = None  # of a model on the hub
    lora: LoraOptions | None = None  # fine-tune the model first
    skip_bad_rows: bool = False  # skip and count unusable rows of text files
    uncertainty: TableOptions | None = None  # train a table of uncertainty codes

    def __post_init__(self) -> None:
        check_number("--states-gb", self.states_gb, "a positive number", lambda x: x > 0)
        if self.device == BALANCED and self.uncertainty:
            raise InputError(
                "--device balanced may leave layers on disk, through which --uncertainty cannot "
                "train: choose one device."
            )

    def index(self, model: PreTrainedModel) -> IndexOptions:
        """Return how a model reads the corpus, for the hidden states and for the lens."""
        options = IndexOptions(
            contexts=self.contexts,
            window=self.window or 0,
            positions=self.positions,
            codes=self.codes,
            bf16=uses_bf16(self.precision, device_named(self.device)),
        )
        return options_for(model, options)

    def states(self, tokens: int, width: int) -> int:
        """Return the number of positions that the head is fitted to; InputError: too few."""
        available = max(1, min(tokens, int(self.states_gb * 1e9 / bytes_per_position(width))))
        prototypes = self.fit.of_states(available).prototypes or 0
        if available < prototypes:
            raise InputError(
                f"the head would be fitted to {available:,} of {tokens:,} positions, fewer than "
                f"the {prototypes:,} prototypes: use more text, raise --states-gb, or lower "
                "--prototypes."
            )
        return available


@dataclass(frozen=True)
class AttachResult:
    """A model with a head and a lens."""

    directory: Path
    lens: Path
    corpus: Path
    states: int  # positions that the head was fitted to
    quality: HeadQuality
    uncertainty: dict[str, float] | None = None  # effect of the table of uncertainty codes, if any

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = {"model": str(self.directory), **asdict(self)}
        del values["directory"]
        return values | {"lens": str(self.lens), "corpus": str(self.corpus)}


def attach(
    model: str,
    corpus: Sequence[Path | str],
    out: Path,
    options: AttachOptions | None = None,
    *,
    progress: Reporter = SILENT,
) -> AttachResult:
    """Attach a head to a model, and index the corpus with it.

    ``out`` becomes a checkpoint with the model's weight files, the two files of the head and a
    lens. The model reads the corpus once; its hidden states are stored until the head is fitted
    and the lens is written. Running the same command again keeps finished parts.

    The processes of ``torchrun``, which need one file system, divide the reading, the rows of each
    step of a fit, and the lens. With the device ``balanced`` they divide the weights and the rows
    of fine-tuning, and the first does the rest, with the model spread over all GPUs.

    Args:
        model: a directory, a GGUF file or a name on the hub.
        corpus: a corpus directory with this model's tokenizer, or text files to build a corpus of.
        out: the model directory to write.
        options: see :class:`AttachOptions`.
        progress: shows progress.

    Raises:
        InputError: an input cannot be used; PrismError: the disk is full; Interrupted: Ctrl-C.
    """
    parallel.join()
    options, out = options or AttachOptions(), Path(out)
    base = parallel.on_main(lambda: find_base(model, options.revision))
    if options.uncertainty and has_uncertainty(base.path):
        raise InputError(
            f"{model} has a table of uncertainty codes already: leave out --uncertainty to attach "
            "a head to it."
        )
    parallel.on_main(lambda: check_ours(out, ATTACH_FILE, "attach"))
    with ExitStack() as stack:
        parallel.on_main(lambda: stack.enter_context(writing(out, within=True)))
        stack.enter_context(keeping(lambda: f"The finished parts are kept in {out}."))
        parallel.on_main(lambda: _begin(out, base, corpus, options))
        run = _AttachRun(out, base, corpus, options, progress)
        lens = out / "lens" / run.corpus.name
        if not parallel.on_main(lambda: has_sidecar(out) and lens.exists()):
            run.check()
            run.tune()
            if run.spread:
                parallel.alone(lambda: run.attach_head(lens))
            else:
                run.attach_head(lens)
        parallel.on_main(lambda: run.finish(lens))
    provenance = load_sidecar(out).provenance
    return AttachResult(
        directory=out,
        lens=lens,
        corpus=run.corpus.path,
        states=provenance["attached"]["states"],
        quality=HeadQuality(**provenance["quality"]),
        uncertainty=provenance.get("uncertainty_feedback"),
    )


def _begin(
    out: Path, base: BaseCheckpoint, corpus: Sequence[Path | str], options: AttachOptions
) -> None:
    """Store the settings, or check that they are those of the run to resume.

    Until a part is finished, rejected options and texts can be corrected, but not the model.
    """
    model = str(base.path.resolve()) if base.revision is None else base.name
    bound = {"model": model, "revision": base.revision}
    settings = bound | {"corpus": [str(Path(path).resolve()) for path in corpus]}
    settings |= {k: v for k, v in flat(asdict(options)).items() if k not in FREE_TO_CHANGE}
    if (out / ATTACH_FILE).is_file():
        before = read_note(out / ATTACH_FILE, out)
        parts = (ADAPTER, EFFECT_FILE, META_FILE, f"{WORK}/{STATES}/{scan.META_FILE}")
        if not any((out / part).exists() for part in parts):
            if before.get("corpus") != settings["corpus"]:
                shutil.rmtree(out / CORPORA, ignore_errors=True)
            before = settings | {name: before.get(name) for name in bound}
        way_out = "Restore these settings, or choose another --out."
        check_same(f"{out} was begun with other settings", before, settings, way_out)
    if not (out / ADAPTER).exists():
        _check_lora(options)
    keep_json(out / ATTACH_FILE, settings)


def _check_lora(options: AttachOptions) -> None:
    """Refuse to fine-tune a model that one process spreads over devices."""
    if options.device == BALANCED and options.lora and parallel.world_size() == 1:
        raise InputError(
            "--device balanced may leave layers on disk, through which one process cannot train "
            "for --lora: start several, which divide the model among their GPUs (torchrun "
            "--nproc-per-node N -m prismlm attach …), or choose one device."
        )


class _AttachRun:
    """The parts of a run, each of which is skipped if its result exists."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self,
        out: Path,
        base: BaseCheckpoint,
        corpus: Sequence[Path | str],
        options: AttachOptions,
        progress: Reporter,
    ) -> None:
        self.out, self.base, self.options, self.progress = out, base, options, progress
        self.device = device_named(options.device)
        # Several processes divide fine-tuning only; then the first spreads the model.
        self.spread = self.device == BALANCED and parallel.world_size() > 1
        if self.device == "cuda" and parallel.world_size() > 1:
            self.device = f"cuda:{torch.cuda.current_device()}"
        # With --lora, out holds the fine-tuned weights, once there are any.
        self.tuned = options.lora is None or parallel.on_main((out / CONFIG_FILE).is_file)
        self._open(out if self.tuned else out / WORK / BASE)
        self.reading = options.index(self.model)
        how = {"window": self.reading.window, "bf16": self.reading.bf16}
        self.passes: dict[str, Any] = how | {"progress": progress}
        self.corpus = self._open_corpus(corpus)
        self.heldout = HeldOut(self.corpus, self.reading.window, 0)

    def _open(self, source: Path) -> None:
        if self.base.is_gguf:
            parallel.on_main(lambda: put_base(self.base, source))
        # Opened before it is copied, so that errors name the original.
        copied = parallel.on_main(lambda: (source / CONFIG_FILE).is_file())
        # In memory, processes of a machine share the pages of its files.
        device = "cpu" if self.spread and parallel.world_size() > 1 else self.device
        opened = read_checkpoint(source if copied else self.base.path, device=device)
        parallel.on_main(lambda: put_base(self.base, source))
        self.source, self.model, self.tokenizer = source, *opened
        self.logit_map = LogitMap.of(self.model)
        verify_logit_map(self.model, self.logit_map)

    def _open_corpus(self, paths: Sequence[Path | str]) -> Corpus:
        """Open the corpus, or build it from text files."""
        if _is_corpus(paths):
            return Corpus.open(Path(paths[0]))
        directory = self.out / CORPORA / (Path(paths[0]).resolve().stem or "corpus")

        def build() -> None:
            if not (directory / "corpus.json").is_file():
                check_tokenizer(self.tokenizer, self.base.name)
                skip, progress = self.options.skip_bad_rows, self.progress
                settings: dict[str, Any] = {"skip_bad_rows": skip, "progress": progress}
                build_corpus(list(paths), directory, tokenizer=self.source, **settings)

        parallel.on_main(build)
        return Corpus.open(directory)

    def check(self) -> None:
        """Check the inputs before hours of work."""
        corpus, options = self.corpus, self.options
        check_tokenizer_of(corpus, self.tokenizer, self.base.name)
        check_index(self.model, corpus, self.reading)
        self.heldout.batches(1)
        documents, tokens = split_counts(corpus, "train")
        # The last token of a document predicts nothing.
        tokens -= documents

        width = weight_of(self.model).shape[1]
        available = options.states(tokens, width)
        needed = available * bytes_per_position(width)
        check_room(f"the hidden states in {self.out}", self.out, needed, self.out / WORK)

    def tune(self) -> None:
        """Fine-tune the model and open the result."""
        adapter, lora = self.out / ADAPTER, self.options.lora
        if lora is None or self.tuned:
            return
        if not parallel.on_main(adapter.exists):
            base, shards = self.base.name, device_named("auto") if self.spread else None
            how = {"base": base, "shards": shards, **self.passes}
            tuning.adapt(self.model, self.corpus, lora, adapter, **how)
        parallel.on_main(lambda: put_adapted(self.source, adapter, self.out))
        self._open(self.out)
        # Of the weights of each process.
        torch.cuda.empty_cache()

    def attach_head(self, lens: Path) -> None:
        """Do the other parts with the model that is opened, or in one process with it spread."""
        if self.spread:
            self._open(self.source)
        self.train_table()
        states = self.states()
        self.index(self.head(states), states, lens)

    def train_table(self) -> None:
        """Train a table of uncertainty codes and measure its effect."""
        options = self.options
        done = parallel.on_main((self.out / EFFECT_FILE).is_file)
        if options.uncertainty is None or done:
            return
        tuning.train_table(self.model, self.corpus, options.uncertainty, **self.passes)
        feedback = uncertainty_of(self.model)
        assert feedback is not None

        def save() -> None:
            effect = tuning.effect_of_table(self.model, self.heldout, options.heldout_tokens)
            save_uncertainty(self.out, feedback)
            keep_json(self.out / EFFECT_FILE, effect)

        parallel.on_main(save)

    def states(self) -> HiddenStates:
        """Return the hidden states of the corpus, stored on disk; each process reads some."""
        limit, count = self.options.states_gb * 1e9, parallel.world_size()
        whole = self.out / WORK / STATES
        read = partial(read_states, self.model, self.corpus, limit_bytes=limit)
        if count > 1 and not parallel.on_main((whole / scan.META_FILE).is_file):
            parts = [whole / f"{number + 1}-of-{count}" for number in range(count)]
            shard = Shard(parallel.rank(), count)
            read(parts[shard.number], self.reading, shard=shard, progress=self.progress)
            parallel.barrier()

            def join() -> None:
                join_states([HiddenStates.open(part) for part in parts], whole)
                for part in parts:
                    shutil.rmtree(part)

            parallel.on_main(join)
        return read(whole, self.reading, progress=self.progress)

    def head(self, states: HiddenStates) -> PrototypeHead:
        """Fit, measure and write the head."""
        if not parallel.on_main(lambda: has_sidecar(self.out)):
            head, history = fit(self.model, states, self.options.fit, progress=self.progress)
            parallel.on_main(lambda: self._save(head, history, states))
        return load_sidecar(self.out, self.model).head

    def _save(
        self, head: PrototypeHead, history: list[dict[str, float]], states: HiddenStates
    ) -> None:
        """Measure and write a head."""
        tokens = self.options.heldout_tokens
        with self.progress.task("Measuring the head", tokens, "tokens") as task:
            text = self.heldout.counted(tokens, task)
            quality = measure_quality(self.model, head.to(self.model.device), self.logit_map, text)
        base = replace(base_of(self.model), name=self.base.name, revision=self.base.revision)
        provenance = self._provenance(states, quality)
        with room_to_write("the head", self.out, WAY_OUT):
            write_history(self.out, history)
            save_sidecar(self.out, Sidecar(head.cpu(), self.logit_map, base, provenance))

    def _provenance(self, states: HiddenStates, quality: HeadQuality) -> dict[str, Any]:
        count, corpus = len(states), self.corpus
        options = replace(self.options, fit=self.options.fit.of_states(count))
        provenance: dict[str, Any] = {
            "attached": {
                **flat(asdict(options)),
                "window": self.reading.window,
                "states": count,
                "steps": options.fit.steps(count),
                # Not "corpus", which would be the training text of the model.
                "read": {"name": corpus.name, "fingerprint": corpus.fingerprint},
            },
            "quality": quality.to_dict(),
            "versions": versions("torch", "transformers"),
        }
        if options.lora is not None:
            provenance["fine_tuned"] = read_json(self.out / ADAPTER / tuning.NOTE_FILE)
        if options.uncertainty is not None:
            provenance["uncertainty_feedback"] = read_json(self.out / EFFECT_FILE)
        return provenance

    def index(self, head: PrototypeHead, states: HiddenStates, lens: Path) -> None:
        """Write the lens from the stored states; each process writes a part."""
        if parallel.on_main(lens.exists):
            return
        shard = Shard(parallel.rank(), parallel.world_size())
        build_index(
            self.model,
            head.to(self.model.device),
            self.corpus,
            lens,
            replace(self.reading, shard=shard),
            trained_on="fine-tuned" if self.options.lora else False,
            # Parts that another number of processes left.
            overwrite=True,
            states=states,
            progress=self.progress,
        )
        parallel.barrier()

    def finish(self, lens: Path) -> None:
        """Name the prototypes, and remove what is no longer needed."""
        if read_meta(lens).labels is None:
            opened = Lens.open(lens, self.model, load_sidecar(self.out).head)
            label_lens(opened, self.model, progress=self.progress)
        if not self.options.keep_states:
            shutil.rmtree(self.out / WORK, ignore_errors=True)


def _is_corpus(paths: Sequence[Path | str]) -> bool:
    return len(paths) == 1 and (Path(paths[0]) / "corpus.json").is_file()


def estimate_attach(
    model: str, corpus: Sequence[Path | str], options: AttachOptions | None = None
) -> Cost:
    """Estimate the cost of :func:`attach` from a forward pass and a few steps; write nothing."""
    options = options or AttachOptions()
    _check_lora(options)
    device = device_named(options.device)
    with tempfile.TemporaryDirectory() as name:
        base = find_base(model, options.revision)
        path = Path(name) / "model" if base.is_gguf else base.path
        if base.is_gguf:
            put_base(base, path)
        opened, tokenizer = read_checkpoint(path, device=device)
        if _is_corpus(corpus):
            documents, tokens = split_counts(Corpus.open(Path(corpus[0])), "train")
        else:
            check_tokenizer(tokenizer, base.name)
            settings = {"tokenizer": path, "skip_bad_rows": options.skip_bad_rows}
            built = estimate_build(list(corpus), Path(name) / "corpus", **settings).figures
            documents, tokens = built["documents"], built["tokens"]
    # The last token of a document predicts nothing.
    tokens -= documents
    reading = options.index(opened)
    per_token, sample = _time_reading(opened, reading)
    # A model with uncertainty feedback reads everything twice.
    per_token *= 2 if options.uncertainty else 1
    states, rows = options.states(tokens, sample.width), min(options.fit.batch, len(sample))
    fit_options = options.fit.of_states(states)
    head = fit_options.head(sample.width)
    head.reset_parameters(torch.Generator().manual_seed(0))
    fitting = Fitting(opened, sample, fit_options, head.to(opened.device))
    per_step = seconds_of(lambda: fitting.take(np.arange(rows)), MEASURED_STEPS)
    steps = fit_options.steps(states)
    epochs = sum(stage.epochs for stage in (options.lora, options.uncertainty) if stage)
    # Text whose states are not stored is read for the lens; routing takes no longer than a step.
    seconds = tokens * per_token * (TRAINING_FACTOR * epochs + OVERLAP_FACTOR)
    seconds += (steps + tokens / rows) * per_step
    sizes = sample.width, len(weight_of(opened)), tokens
    cells = cells_format(*sizes, options.codes, options.positions)
    disk = states * bytes_per_position(sample.width)
    disk += index_bytes(cells, head, reading, documents, tokens)[0]
    figures = {"tokens": tokens, "states": states, "steps": steps}
    basis = "Measured on one forward pass and a few steps."
    return Cost(seconds, peak_memory(opened.device.type), disk, figures, basis)


def _time_reading(model: Any, reading: IndexOptions) -> tuple[float, HiddenStates]:
    """Return the seconds per position of a forward pass, and its hidden states."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.device
    shape = (max(1, pass_tokens(device) // reading.window), reading.window)
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=reading.bf16)
    with evaluating(model), autocast, capture(model, logits=False) as captured:
        seconds = seconds_of(lambda: model(input_ids=ids, use_cache=False), 1)
    z = captured.z.flatten(0, 1).bfloat16().cpu()
    states = HiddenStates({}, [0, len(z)], z.view(torch.int16).numpy(), ids.flatten().cpu().numpy())
    return seconds / ids.numel(), states
