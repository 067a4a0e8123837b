"""Attaching a prototype head to a model that exists: its weights stay as they are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus import build_corpus, estimate_build
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer, tokenizer_fingerprint
from prismlm.corpus.windows import split_counts
from prismlm.cost import Cost, peak_memory, seconds_of
from prismlm.errors import InputError
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import check_room, keep_json, read_json, room_to_write
from prismlm.layers import PrototypeHead
from prismlm.lens.build import IndexOptions, build_index, check_index, lens_bytes, options_for
from prismlm.lens.codes import CodeName
from prismlm.lens.labels.write import label_lens
from prismlm.lens.layout import read_meta
from prismlm.lens.lens import Lens
from prismlm.lens.states import (
    META_FILE,
    HiddenStates,
    bytes_per_position,
    pass_tokens,
    read_states,
)
from prismlm.models.base import CONFIG_FILE, BaseCheckpoint, find_base, put_adapted, put_base
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import device_named, uses_bf16
from prismlm.models.seam import LogitMap, capture, verify_logit_map
from prismlm.models.sidecar import (
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
from prismlm.training.evaluation import HeldOut, cross_entropy
from prismlm.training.fit import FitOptions, Fitting, fit
from prismlm.training.recipe_file import flat
from prismlm.training.run import check_ours, write_history
from prismlm.training.setup import versions
from prismlm.training.tuning import (
    NOTE_FILE,
    LoraOptions,
    TableOptions,
    adapt,
    check_lora,
    effect_of_table,
    train_table,
)

ATTACH_FILE, EFFECT_FILE = "attach.json", "uncertainty_feedback.json"
CORPORA, ADAPTER, WORK = "corpora", "adapter", "attach"
# Within WORK, which is removed at the end.
STATES, BASE = "states", "base"
OF_THE_MODEL = ("model", "revision")
# What may differ when a command is run again: it changes no result.
FREE = ("keep_states", "device", "revision", "skip_bad_rows")
STEPS_MEASURED = 3
# Windows overlap by a quarter.
READ_TWICE = 4 / 3
# A forward and a backward pass take about so many forward passes.
BACKWARD = 3


@dataclass(frozen=True)
class AttachOptions:
    """How a head is attached.

    Attributes:
        fit: how it is fitted.
        window: tokens that the model reads at once; 512, or what it can read, if left out.
        states_gb: the most disk for hidden states; what fits is an even sample of the corpus.
        keep_states: leave them there, to fit another head.
        contexts: L, the places kept per prototype in the lens.
        positions: the share of positions that goes to the lens's cells.
        codes: of their states, int8 or pq.
        heldout_tokens: that the head's figures are measured on.
        device: where the model runs: auto, cpu or cuda.
        precision: of reading the corpus: auto, float32 or bf16.
        revision: of a model from the hub.
        lora: how the model is fine-tuned on the corpus first; None leaves it as it is.
        skip_bad_rows: leave out rows of text files that cannot be used, and count them.
        uncertainty: how a table of uncertainty codes is trained for it then; None for no feedback.
    """

    fit: FitOptions = field(default_factory=FitOptions)
    window: int | None = None
    states_gb: float = 4.0
    keep_states: bool = False
    contexts: int = 64
    positions: float = 1.0
    codes: CodeName = "int8"
    heldout_tokens: int = 20_000
    device: str = "auto"
    precision: str = "auto"
    revision: str | None = None
    lora: LoraOptions | None = None
    skip_bad_rows: bool = False
    uncertainty: TableOptions | None = None

    def __post_init__(self) -> None:
        if not self.states_gb > 0:
            raise InputError(f"--states-gb is {self.states_gb:g}: expected more than 0.")

    def index(self, model: PreTrainedModel) -> IndexOptions:
        """Return how a model reads the corpus, for the states and for the lens alike."""
        options = IndexOptions(
            contexts=self.contexts,
            window=self.window or 0,
            positions=self.positions,
            codes=self.codes,
            bf16=uses_bf16(self.precision, device_named(self.device)),
        )
        return options_for(model, options)

    def states(self, tokens: int, width: int) -> int:
        """Return how many of a corpus's positions the head is fitted to."""
        return max(1, min(tokens, int(self.states_gb * 1e9 / bytes_per_position(width))))


@dataclass(frozen=True)
class AttachResult:
    """A model with a head and a lens.

    Attributes:
        directory: the model directory.
        lens: of the corpus.
        corpus: that was read.
        states: positions that the head was fitted to.
        quality: the head's figures on held-out text.
        uncertainty: of :func:`effect_of_table`; None without a table of uncertainty codes.
    """

    directory: Path
    lens: Path
    corpus: Path
    states: int
    quality: HeadQuality
    uncertainty: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "model": str(self.directory),
            "lens": str(self.lens),
            "corpus": str(self.corpus),
            "states": self.states,
            "quality": self.quality.to_dict(),
            "uncertainty": self.uncertainty,
        }


def attach(
    model: str,
    corpus: Sequence[Path | str],
    out: Path,
    options: AttachOptions | None = None,
    *,
    progress: Reporter = SILENT,
) -> AttachResult:
    """Attach a head to a model, and index the corpus with it.

    ``out`` becomes a checkpoint like any other, whose weight files are those of the model, with the
    two files of the head beside them and a lens. The model is run over the corpus once; its hidden
    states are kept on disk while the head is fitted to them and the lens is written. A part that
    was finished is kept: the same command continues with the next.

    Args:
        model: a directory, a GGUF file or a name on the hub.
        corpus: a corpus directory of this model's tokenizer, or text files to build one of.
        out: the model directory to write.
        options: see :class:`AttachOptions`.
        progress: shows what is under way.

    Raises:
        InputError: the model, corpus or an option cannot be used, or ``out`` holds something else.
        FormatError: something that is read is damaged.
        PrismError: the disk is full.
        Interrupted: Ctrl-C was pressed; what was finished is kept.
    """
    options, out = options or AttachOptions(), Path(out)
    base = find_base(model, options.revision)
    if options.lora:
        check_lora()
    if options.uncertainty and has_uncertainty(base.path):
        raise InputError(
            f"{model} has a table of uncertainty codes already: leave --uncertainty out to attach "
            "a head to it as it is."
        )
    check_ours(out, ATTACH_FILE, "attach")
    kept = keeping(lambda: f"The finished parts are kept in {out}.")
    with writing(out, within=True), kept:
        _begin(out, base, corpus, options)
        parts = _Parts(out, base, options, progress)
        read = parts.corpus(corpus)
        lens = out / "lens" / read.name
        if not (has_sidecar(out) and lens.exists()):
            parts.check(read)
            parts.tune(read)
            parts.train_table(read)
            states = parts.states(read)
            head = parts.head(read, states)
            parts.index(read, states, head, lens)
        if read_meta(lens).labels is None:
            opened = Lens.open(lens, parts.model, load_sidecar(out).head)
            label_lens(opened, parts.model, progress=progress)
        if not options.keep_states:
            shutil.rmtree(out / WORK, ignore_errors=True)
    made = load_sidecar(out).provenance
    quality = HeadQuality(**made["quality"])
    count, effect = made["attached"]["states"], made.get("uncertainty_feedback")
    return AttachResult(out, lens, read.path, count, quality, effect)


def _begin(
    out: Path, base: BaseCheckpoint, corpus: Sequence[Path | str], options: AttachOptions
) -> None:
    """Note what is attached, or check that it is what was noted.

    Until a part is finished, only the model binds: what was refused can be put right.
    """
    now = {
        "model": str(base.path.resolve()) if base.revision is None else base.name,
        "revision": base.revision,
        "corpus": [str(Path(one).resolve()) for one in corpus],
        **{key: value for key, value in flat(asdict(options)).items() if key not in FREE},
    }
    if (out / ATTACH_FILE).is_file():
        before = read_note(out / ATTACH_FILE, out)
        parts = (ADAPTER, EFFECT_FILE, f"{WORK}/{STATES}/{META_FILE}")
        begun = has_sidecar(out) or any((out / part).exists() for part in parts)
        if begun or any(before.get(key) != now[key] for key in OF_THE_MODEL):
            way_out = "Put them back, or choose another --out."
            check_same(f"{out} was begun with other settings", before, now, way_out)
        if before.get("corpus") != now["corpus"]:
            shutil.rmtree(out / CORPORA, ignore_errors=True)
    keep_json(out / ATTACH_FILE, now)


class _Parts:
    """A model that is attached to, opened, and each part of it; those that are there are kept."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __init__(
        self, out: Path, base: BaseCheckpoint, options: AttachOptions, progress: Reporter
    ) -> None:
        self.out, self.base, self.options, self.progress = out, base, options, progress
        self.device = device_named(options.device)
        # Fine-tuned weights take the place of those that were given.
        self.tuned = options.lora is None or (out / CONFIG_FILE).is_file()
        self._open(out if self.tuned else out / WORK / BASE)
        self.reading = options.index(self.model)

    def _open(self, source: Path) -> None:
        if self.base.is_gguf:
            put_base(self.base, source)
        # Read where it is before it is copied: errors name it, and a broken one is never copied.
        copied = (source / CONFIG_FILE).is_file()
        opened = read_checkpoint(source if copied else self.base.path, device=self.device)
        put_base(self.base, source)
        self.source, self.model, self.tokenizer = source, *opened
        self.logit_map = LogitMap.of(self.model)
        verify_logit_map(self.model, self.logit_map)

    def _windows(self) -> dict[str, Any]:
        reading = self.reading
        return {"window": reading.window, "bf16": reading.bf16, "progress": self.progress}

    def _heldout(self, corpus: Corpus) -> HeldOut:
        return HeldOut(corpus, self.reading.window, 0)

    def corpus(self, given: Sequence[Path | str]) -> Corpus:
        """Return the corpus that was given, or one of the files that were."""
        if _is_corpus(given):
            return Corpus.open(Path(given[0]))
        directory = self.out / CORPORA / (Path(given[0]).resolve().stem or "corpus")
        if (directory / "corpus.json").is_file():
            return Corpus.open(directory)
        check_tokenizer(self.tokenizer, self.base.name)
        return build_corpus(
            list(given),
            directory,
            tokenizer=self.source,
            skip_bad_rows=self.options.skip_bad_rows,
            progress=self.progress,
        )

    def check(self, corpus: Corpus) -> None:
        """Check what can be checked before hours of work."""
        check_index(self.model, corpus, self.reading, tokenizer_fingerprint(self.tokenizer))
        self._heldout(corpus).batches(1)
        documents, tokens = split_counts(corpus, "train")
        # A document's last token predicts nothing.
        tokens -= documents
        width = weight_of(self.model).shape[1]
        available = self.options.states(tokens, width)
        wanted = self.options.fit.of_states(available).prototypes
        if wanted is not None and available < wanted:
            raise InputError(
                f"{available:,} positions to fit to, of {tokens:,} that the corpus "
                f"{corpus.name} trains on, are fewer than the {wanted:,} "
                "prototypes: use more text, more --states-gb, or --prototypes with a lower number."
            )
        needed = available * bytes_per_position(width)
        check_room(f"the hidden states in {self.out}", self.out, needed, self.out / WORK)

    def tune(self, corpus: Corpus) -> None:
        """Fine-tune the model on the corpus, and open what came of it."""
        adapter, tokens = self.out / ADAPTER, self.options.heldout_tokens
        if self.options.lora is None or self.tuned:
            return
        if not adapter.exists():
            with self.progress.task("Measuring the model", tokens, "tokens") as task:
                text = self._heldout(corpus).counted(tokens, task)
                ce_before = cross_entropy(self.model, text)
            history = adapt(
                self.model,
                corpus,
                self.options.lora,
                adapter,
                base=self.base.name,
                note={"ce_before": ce_before},
                **self._windows(),
            )
            write_history(self.out / WORK, history)
        put_adapted(self.source, adapter, self.out)
        self._open(self.out)

    def train_table(self, corpus: Corpus) -> None:
        """Train a table of uncertainty codes, and note what it changes."""
        options = self.options
        if options.uncertainty is None or (self.out / EFFECT_FILE).is_file():
            return
        train_table(self.model, corpus, options.uncertainty, **self._windows())
        feedback = uncertainty_of(self.model)
        assert feedback is not None
        effect = effect_of_table(self.model, self._heldout(corpus), options.heldout_tokens)
        save_uncertainty(self.out, feedback)
        keep_json(self.out / EFFECT_FILE, effect)

    def states(self, corpus: Corpus) -> HiddenStates:
        """Return the hidden states of the corpus, kept on disk."""
        return read_states(
            self.model,
            corpus,
            self.out / WORK / STATES,
            self.reading,
            limit_bytes=self.options.states_gb * 1e9,
            progress=self.progress,
        )

    def head(self, corpus: Corpus, states: HiddenStates) -> PrototypeHead:
        """Return the head, fitted and measured."""
        if has_sidecar(self.out):
            return load_sidecar(self.out, self.model).head
        options, tokens = self.options.fit, self.options.heldout_tokens
        head, history = fit(self.model, states, options, device=self.device, progress=self.progress)
        with self.progress.task("Measuring the head", tokens, "tokens") as task:
            text = self._heldout(corpus).counted(tokens, task)
            quality = measure_quality(self.model, head.to(self.device), self.logit_map, text)
        base = replace(base_of(self.model), name=self.base.name, revision=self.base.revision)
        provenance = self._provenance(corpus, states, quality)
        with room_to_write("the head", self.out, "Make room, and give the same command again."):
            write_history(self.out, history)
            save_sidecar(self.out, Sidecar(head.cpu(), self.logit_map, base, provenance))
        return head

    def _provenance(
        self, corpus: Corpus, states: HiddenStates, quality: HeadQuality
    ) -> dict[str, Any]:
        options = replace(self.options, fit=self.options.fit.of_states(len(states)))
        tuned: dict[str, Any] = {}
        if options.lora is not None:
            tuned["fine_tuned"] = read_json(self.out / ADAPTER / NOTE_FILE)
        if options.uncertainty is not None:
            tuned["uncertainty_feedback"] = read_json(self.out / EFFECT_FILE)
        return {
            "attached": {
                **flat(asdict(options)),
                "window": self.reading.window,
                "states": len(states),
                "steps": options.fit.steps(len(states)),
                # Not what the model was trained on, which a "corpus" would be.
                "read": {"name": corpus.name, "fingerprint": corpus.fingerprint},
            },
            **tuned,
            "quality": quality.to_dict(),
            "versions": versions("torch", "transformers"),
        }

    def index(self, corpus: Corpus, states: HiddenStates, head: PrototypeHead, lens: Path) -> None:
        """Write the lens, from the states on disk."""
        if not lens.exists():
            build_index(
                self.model,
                head.to(self.device),
                corpus,
                lens,
                self.reading,
                trained_on="fine-tuned" if self.options.lora else False,
                states=states,
                progress=self.progress,
            )


def _is_corpus(given: Sequence[Path | str]) -> bool:
    return len(given) == 1 and (Path(given[0]) / "corpus.json").is_file()


def estimate_attach(
    model: str, corpus: Sequence[Path | str], options: AttachOptions | None = None
) -> Cost:
    """Say what :func:`attach` with the same arguments would take.

    A forward pass and a few steps of the fit are timed, and multiplied. Nothing is written but for
    a model that has to be fetched, to the hub's cache. The figures are ``tokens``, positions of the
    corpus; ``states`` that the head is fitted to, in ``steps``; what the seconds are made of:
    ``tune_seconds`` of fine-tuning, ``read_seconds`` of hidden states, ``fit_seconds`` of the head,
    ``lens_seconds``; and what the disk is: ``states_bytes`` while they are needed, ``lens_bytes``.

    Raises:
        InputError: the model or corpus cannot be used.
    """
    options = options or AttachOptions()
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
            how = {"tokenizer": path, "skip_bad_rows": options.skip_bad_rows}
            built = estimate_build(list(corpus), Path(name) / "corpus", **how)
            documents, tokens = built.documents, built.tokens
    # A document's last token predicts nothing.
    tokens -= documents
    per_token, sample = _time_reading(opened, reading := options.index(opened))
    states = options.states(tokens, sample.width)
    fitted = options.fit.of_states(states)
    head = fitted.head(sample.width)
    head.reset_parameters(torch.Generator().manual_seed(0))
    fitting = Fitting(opened, sample, fitted, head.to(device))
    rows = torch.arange(min(fitted.batch, len(sample))).numpy()
    per_step = seconds_of(lambda: fitting.take(rows), STEPS_MEASURED)
    steps, tuned = fitted.steps(states), [options.lora, options.uncertainty]
    # With a table a model reads everything twice.
    per_token *= 2 if options.uncertainty is not None else 1
    seconds = {
        "tune_seconds": BACKWARD * tokens * per_token * sum(one.epochs for one in tuned if one),
        "read_seconds": states * per_token * READ_TWICE,
        "fit_seconds": steps * per_step,
        # Text whose states were not kept is read again; a position takes no longer than in a fit.
        "lens_seconds": max(0, tokens - states) * per_token * READ_TWICE
        + tokens * per_step / len(rows),
    }
    disk = {"states_bytes": states * bytes_per_position(sample.width)}
    disk["lens_bytes"] = lens_bytes(head, reading, documents, tokens)
    return Cost(
        sum(seconds.values()),
        peak_memory(device),
        sum(disk.values()),
        {"tokens": tokens, "states": states, "steps": steps, **seconds, **disk},
        basis="Measured on one forward pass and a few steps.",
    )


def _time_reading(model: Any, reading: IndexOptions) -> tuple[float, HiddenStates]:
    """Return the seconds of a position in a forward pass, and the states of one."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.device
    shape = (max(1, pass_tokens(device) // reading.window), reading.window)
    ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=reading.bf16)
    with evaluating(model), autocast, capture(model, logits=False) as seen:
        seconds = seconds_of(lambda: model(input_ids=ids, use_cache=False), 1)
    z = seen.z.flatten(0, 1).bfloat16().cpu()
    states = HiddenStates({}, [0, len(z)], z.view(torch.int16).numpy(), ids.flatten().cpu().numpy())
    return seconds / ids.numel(), states
