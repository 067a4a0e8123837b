"""Attaching a prototype head to a model that exists: its weights stay as they are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus import build_corpus
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer, tokenizer_fingerprint
from prismlm.corpus.windows import split_counts
from prismlm.errors import InputError
from prismlm.explain.quality import HeadQuality, measure_quality
from prismlm.files import check_room, keep_json, read_json, room_to_write
from prismlm.index.build import build_index, check_index
from prismlm.index.layout import read_meta
from prismlm.index.lens import Lens
from prismlm.index.states import META_FILE, HiddenStates, bytes_per_position, read_states
from prismlm.labels.write import label_lens
from prismlm.layers import PrototypeHead
from prismlm.models.base import CONFIG_FILE, BaseCheckpoint, find_base, put_adapted, put_base
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.device import device_named, uses_bf16
from prismlm.models.seam import LogitMap, verify_logit_map
from prismlm.models.sidecar import (
    Sidecar,
    base_of,
    has_sidecar,
    load_sidecar,
    save_sidecar,
    weight_of,
)
from prismlm.models.uncertainty_feedback import has_uncertainty, save_uncertainty, uncertainty_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import check_same, read_note
from prismlm.training.attach_options import AttachOptions, index_options, window_of
from prismlm.training.device import versions
from prismlm.training.evaluation import HeldOut, cross_entropy
from prismlm.training.fit import fit
from prismlm.training.lora import NOTE_FILE, adapt, check_lora
from prismlm.training.recipe_values import flat
from prismlm.training.run import write_history
from prismlm.training.run_directory import ATTACH_FILE, exclusive
from prismlm.training.uncertainty_table import TableOptions, effect_of_table, train_table

CORPORA = "corpora"
WORK = "attach"
STATES = "states"
FIT_FILE = "fit.pt"
BASE, ADAPTER, LORA_FILE, BEFORE_FILE = "base", "adapter", "lora.pt", "before.json"
TABLE_FILE, EFFECT_FILE = "table.pt", "uncertainty_feedback.json"
OF_THE_MODEL = ("model", "revision")
# What may differ when a command goes on: it changes no result.
FREE = ("keep_states", "device", "revision", "skip_bad_rows")


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
    states are kept on disk while the head is fitted to them and the lens is written. What was done
    stays done: the same command goes on where an earlier one stopped.

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
        Interrupted: SIGINT or SIGTERM came; what was done is kept.
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
    with exclusive(out, ATTACH_FILE):
        _begin(out, base, corpus, options)
        tuned = options.lora is None or (out / CONFIG_FILE).is_file()
        source = out if tuned else out / WORK / BASE
        work = _Work(out, base, options, progress, source)
        found = work.corpus(corpus)
        lens = out / "lens" / found.name
        if not (has_sidecar(out) and lens.exists()):
            work.check(found)
            if not tuned:
                work.tune(found)
            if options.uncertainty and not (out / EFFECT_FILE).is_file():
                work.table(found, options.uncertainty)
            states = work.states(found)
            work.lens(found, states, work.head(found, states), lens)
        work.names(lens)
        if not options.keep_states:
            shutil.rmtree(out / WORK, ignore_errors=True)
    made = load_sidecar(out).provenance
    quality = HeadQuality(**made["quality"])
    count, effect = made["attached"]["states"], made.get("uncertainty_feedback")
    return AttachResult(out, lens, found.path, count, quality, effect)


def _begin(
    out: Path, base: BaseCheckpoint, corpus: Sequence[Path | str], options: AttachOptions
) -> None:
    """Note what is attached, or check that it is what was noted.

    Until hidden states are there, only the model binds: what was refused can be put right.

    Raises:
        InputError: it was begun with something else.
        FormatError: the note is damaged.
    """
    now = {
        "model": str(base.path.resolve()) if base.revision is None else base.name,
        "revision": base.revision,
        "corpus": [str(Path(one).resolve()) for one in corpus],
        **{key: value for key, value in flat(asdict(options)).items() if key not in FREE},
    }
    if (out / ATTACH_FILE).is_file():
        before = read_note(out / ATTACH_FILE, out)
        begun = has_sidecar(out) or (out / WORK / STATES / META_FILE).is_file()
        if begun or any(before.get(key) != now[key] for key in OF_THE_MODEL):
            way_out = "Put them back, or choose another --out."
            check_same(f"{out} was begun with other settings", before, now, way_out)
        if before.get("corpus") != now["corpus"]:
            shutil.rmtree(out / CORPORA, ignore_errors=True)
    keep_json(out / ATTACH_FILE, now)


class _Work:
    """The steps, each of which finds what is done and does the rest."""

    def __init__(
        self,
        out: Path,
        base: BaseCheckpoint,
        options: AttachOptions,
        progress: Reporter,
        source: Path,
    ) -> None:
        self.out, self.base, self.options, self.progress = out, base, options, progress
        self.device = device_named(options.device)
        self._open(source)
        self.window = window_of(self.model, options)
        self.index = index_options(options, self.window)

    def _open(self, source: Path) -> None:
        if self.base.is_gguf:
            put_base(self.base, source)
        # Read where it is before it is copied: errors name it, and a broken one is never copied.
        copied = (source / CONFIG_FILE).is_file()
        opened = read_checkpoint(source if copied else self.base.path, device=self.device)
        put_base(self.base, source)
        self.source = source
        self.model: PreTrainedModel = opened[0]
        self.tokenizer: PreTrainedTokenizerBase = opened[1]
        self.logit_map = LogitMap.of(self.model)
        verify_logit_map(self.model, self.logit_map)

    def corpus(self, given: Sequence[Path | str]) -> Corpus:
        """Return the corpus that was given, or one of the files that were."""
        if len(given) == 1 and (Path(given[0]) / "corpus.json").is_file():
            return Corpus.open(Path(given[0]))
        built = self.out / CORPORA / (Path(given[0]).resolve().stem or "corpus")
        if (built / "corpus.json").is_file():
            return Corpus.open(built)
        check_tokenizer(self.tokenizer, self.base.name)
        return build_corpus(
            list(given),
            built,
            tokenizer=self.source,
            skip_bad_rows=self.options.skip_bad_rows,
            progress=self.progress,
        )

    def check(self, corpus: Corpus) -> None:
        """Check what can be checked before hours of work."""
        check_index(self.model, corpus, self.index, tokenizer_fingerprint(self.tokenizer))
        HeldOut(corpus, self.window, 0).batches(1)
        documents, tokens = split_counts(corpus, "train")
        room = self.options.states_gb * 1e9 / bytes_per_position(weight_of(self.model).shape[1])
        available = min(tokens - documents, int(room))
        wanted = self.options.fit.of_states(available).prototypes
        if wanted is not None and available < wanted:
            raise InputError(
                f"{available:,} positions to fit to, of {tokens - documents:,} that the corpus "
                f"{corpus.name} trains on, are fewer than the {wanted:,} "
                "prototypes: use more text, more --states-gb, or --prototypes with a lower number."
            )
        states = available * bytes_per_position(weight_of(self.model).shape[1])
        check_room(f"the hidden states in {self.out}", self.out, states, self.out / WORK)

    def tune(self, corpus: Corpus) -> None:
        """Fine-tune the model on the corpus, and open what came of it."""
        assert self.options.lora is not None
        work, adapter = self.out / WORK, self.out / ADAPTER
        if not adapter.exists():
            if not (work / BEFORE_FILE).is_file():
                keep_json(work / BEFORE_FILE, {"ce_before": self._ce(corpus)})
            history = adapt(
                self.model,
                corpus,
                self.options.lora,
                work / LORA_FILE,
                adapter,
                base=self.base.name,
                window=self.window,
                bf16=uses_bf16(self.options.precision, self.device),
                note=read_json(work / BEFORE_FILE),
                progress=self.progress,
            )
            write_history(work, history)
        put_adapted(self.source, adapter, self.out)
        self._open(self.out)

    def table(self, corpus: Corpus, options: TableOptions) -> None:
        """Train a table of uncertainty codes, and note what it changes."""
        train_table(
            self.model,
            corpus,
            options,
            self.out / WORK / TABLE_FILE,
            window=self.window,
            bf16=uses_bf16(self.options.precision, self.device),
            progress=self.progress,
        )
        feedback = uncertainty_of(self.model)
        assert feedback is not None
        save_uncertainty(self.out, feedback)
        held_out = HeldOut(corpus, self.window, 0)
        effect = effect_of_table(self.model, held_out, self.options.heldout_tokens)
        keep_json(self.out / EFFECT_FILE, effect)

    def _ce(self, corpus: Corpus) -> float:
        tokens = self.options.heldout_tokens
        with self.progress.task("Measuring the model", tokens, "tokens") as task:
            return cross_entropy(self.model, HeldOut(corpus, self.window, 0).counted(tokens, task))

    def states(self, corpus: Corpus) -> HiddenStates:
        """Return the hidden states, read where they are not there."""
        return read_states(
            self.model,
            corpus,
            self.out / WORK / STATES,
            window=self.window,
            stride=self.index.stride,
            limit_bytes=self.options.states_gb * 1e9,
            bf16=uses_bf16(self.options.precision, self.device),
            progress=self.progress,
        )

    def head(self, corpus: Corpus, states: HiddenStates) -> PrototypeHead:
        """Return the head, fitted and measured where it is not there."""
        if has_sidecar(self.out):
            return load_sidecar(self.out, self.model).head
        head, history = fit(
            self.model,
            states,
            self.options.fit,
            self.out / WORK / FIT_FILE,
            device=self.device,
            progress=self.progress,
        )
        quality = self._measure(corpus, head)
        of = base_of(self.model)
        named = replace(of, name=self.base.name, revision=self.base.revision)
        provenance = self._provenance(corpus, states, quality)
        with room_to_write("the head", self.out, "Make room, and give the same command again."):
            write_history(self.out, history)
            save_sidecar(self.out, Sidecar(head, self.logit_map, named, provenance))
        return head

    def _measure(self, corpus: Corpus, head: PrototypeHead) -> HeadQuality:
        tokens = self.options.heldout_tokens
        with self.progress.task("Measuring the head", tokens, "tokens") as task:
            text = HeldOut(corpus, self.window, 0).counted(tokens, task)
            quality = measure_quality(self.model, head.to(self.device), self.logit_map, text)
        head.cpu()
        return quality

    def _provenance(
        self, corpus: Corpus, states: HiddenStates, quality: HeadQuality
    ) -> dict[str, Any]:
        options = replace(self.options, fit=self.options.fit.of_states(len(states)))
        return {
            "attached": {
                **flat(asdict(options)),
                "window": self.window,
                "states": len(states),
                "steps": options.fit.steps(len(states)),
                # Not what the model was trained on, which a "corpus" would be.
                "read": {"name": corpus.name, "fingerprint": corpus.fingerprint},
            },
            **self._tuning(),
            "quality": quality.to_dict(),
            "versions": versions("torch", "transformers"),
        }

    def _tuning(self) -> dict[str, Any]:
        tuned: dict[str, Any] = {}
        if self.options.lora is not None:
            tuned["fine_tuned"] = read_json(self.out / ADAPTER / NOTE_FILE)
        if self.options.uncertainty is not None:
            tuned["uncertainty_feedback"] = read_json(self.out / EFFECT_FILE)
        return tuned

    def lens(self, corpus: Corpus, states: HiddenStates, head: PrototypeHead, out: Path) -> None:
        """Write the lens where it is not there."""
        if not out.exists():
            build_index(
                self.model,
                head.to(self.device),
                corpus,
                out,
                self.index,
                trained_on="fine-tuned" if self.options.lora else False,
                tokenizer=tokenizer_fingerprint(self.tokenizer),
                states=states,
                progress=self.progress,
            )

    def names(self, lens: Path) -> None:
        """Name the prototypes, where the lens keeps positions and has no names yet."""
        meta = read_meta(lens)
        if meta.labels is None:
            opened = Lens.open(lens, self.model, load_sidecar(self.out).head)
            label_lens(opened, self.model, progress=self.progress)
