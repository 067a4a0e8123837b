"""One streaming pass over a corpus: which text each prototype stands for, and how much of it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.allocator import keep_freed_memory, return_freed_memory, returning_freed_memory
from prismlm.corpus.windows import split_counts
from prismlm.errors import InputError
from prismlm.files import check_room
from prismlm.index import layout
from prismlm.index.codes import check_codes
from prismlm.index.opened_model import check_embedded
from prismlm.index.positions import check_share
from prismlm.index.scan import IndexOptions, Scan, ScanInput, scan_passes
from prismlm.index.state import Partial
from prismlm.index.states import HiddenStates, pass_tokens
from prismlm.index.write import lens_bytes, write_lens
from prismlm.layers import PrototypeHead
from prismlm.models.evaluating import evaluating
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import Interrupts

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

SAVE_SECONDS = 60.0
# A save takes at most this share of the time between two.
SAVE_SHARE = 0.02
WAIT_SECONDS = 0.5
# What the record of a lens says elsewhere, or not.
NOT_OF_A_LENS = ("model", "shards", "positions", "codes", "states", "pass_tokens")


@dataclass(frozen=True)
class Shard:
    """One part of an index that several processes make.

    Attributes:
        number: which, from 0.
        count: of how many.
        finishes: whether this process writes the lens: None, if it is the last to be done; true,
            it waits for the others; false, another one does.
    """

    number: int = 0
    count: int = 1
    finishes: bool | None = None


def build_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    out: Path | str,
    options: IndexOptions | None = None,
    shard: Shard | None = None,
    *,
    trained_on: layout.TrainedOn = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    save_seconds: float = SAVE_SECONDS,
    states: HiddenStates | None = None,
    progress: Reporter = SILENT,
) -> Path | None:
    """Index a corpus, or one part of it, and write a lens directory.

    Every position that predicts a token of its document is scored against every prototype. The
    L nearest positions of each prototype are kept, one per document, ranked by cosine, then by
    position; uses and activations are summed over all positions.

    What was found is saved beside the lens while it is being looked for. An index that was
    interrupted or killed goes on from there when it is called again, to the same bytes. Parts are
    indexed at any time; the last one that is done writes the lens, the one of an undivided index
    if the machines compute the same cosines.

    Args:
        model: the causal language model.
        head: its prototype head.
        corpus: the text; any corpus, also one the model was not trained on.
        out: the lens directory.
        options: window, stride, contexts, split.
        shard: which part, and who writes the lens; all of it, if none is given.
        trained_on: whether the model was trained on this corpus, if that is known.
        tokenizer: the fingerprint of the model's tokenizer, to be checked against the corpus's.
        overwrite: replace an existing lens, and discard what was scanned with other inputs.
        save_seconds: the least time between two saves; 0 saves after every forward pass.
        states: of the same model, corpus, split, window and stride, which are not read again.
        progress: shows tokens done.

    Returns:
        The lens, or None if another process writes it.

    Raises:
        InputError: the lens exists, the corpus has no text in this split, its tokenizer is not
            the model's, the window does not fit the model, another process writes this lens, or
            an index with other inputs was begun.
        FormatError: the corpus, or what was saved, is damaged.
        PrismError: the disk is full or failing.
        Interrupted: SIGINT or SIGTERM came; what was found is saved.
    """
    options, shard = options or IndexOptions(), shard or Shard()
    check_index(model, corpus, options, tokenizer)
    given, partial = ScanInput(model, head, corpus, options, states), Partial(Path(out))
    run = _run(given, shard)
    if _is_published(partial, run):
        return partial.out
    how = {"overwrite": overwrite, "save_seconds": save_seconds}
    return _made(partial, given, shard, run, trained_on, progress, **how)


def _is_published(partial: Partial, run: dict[str, Any]) -> bool:
    """Put a lens in its place that has only to be put there; say whether it is of this run."""
    if not partial.finished():
        return False
    with partial.finishing():
        same = partial.matches(run)
        partial.publish()
    return same


def _made(
    partial: Partial,
    given: ScanInput,
    shard: Shard,
    run: dict[str, Any],
    trained_on: layout.TrainedOn,
    progress: Reporter,
    *,
    overwrite: bool,
    save_seconds: float,
) -> Path | None:
    model, corpus, options = given.model, given.corpus, given.options
    check_lens(partial.out, overwrite=overwrite)
    documents, tokens = split_counts(corpus, options.split)
    expected = lens_bytes(given.head, options, documents, tokens - documents)
    check_room(f"the lens {partial.out}", partial.out, expected, partial.path)
    if model.device.type == "cpu":
        keep_freed_memory()
    with (
        evaluating(model),
        partial.leaving_nothing_useless(),
        Interrupts(partial.rest) as interrupts,
    ):
        with partial.writing("the state"):
            partial.begin(run, overwrite=overwrite)
        with partial.working(shard.number, shard.count):
            _scan_shard(partial, given, shard, save_seconds, interrupts, progress)
        interrupts.now = True
        meta = _meta(given, run, trained_on)
        return _finish(partial, given, shard, meta, progress)


def _run(given: ScanInput, shard: Shard) -> dict[str, Any]:
    """Return everything that what is found depends on."""
    corpus, options = given.corpus, given.options
    run = {
        "model": fingerprints.of_model(given.model),
        "prototypes": layout.prototypes_fingerprint(given.head),
        "tokenizer": corpus.meta["tokenizer"]["fingerprint"],
        "corpus": corpus.fingerprint,
        "split": options.split,
        "window": options.window,
        "stride": options.stride,
        "contexts": options.contexts,
        "positions": options.positions,
        "codes": options.codes,
        "precision": "bf16" if options.bf16 else "float32",
        "shards": shard.count,
        # An interrupted scan counts its passes, and those of another device are of another size.
        "pass_tokens": pass_tokens(given.model.device),
    }
    if given.states is not None:
        given.states.check(run)
        run["states"] = given.states.fingerprint
    return run


def _meta(given: ScanInput, run: dict[str, Any], trained_on: layout.TrainedOn) -> dict[str, Any]:
    corpus, options = given.corpus, given.options
    return {
        **{key: value for key, value in run.items() if key not in NOT_OF_A_LENS},
        "corpus_name": corpus.name,
        "corpus_path": str(corpus.path.resolve()),
        "trained_on": trained_on,
        "documents": split_counts(corpus, options.split)[0],
        "with_text": options.with_text,
    }


def _scan_shard(
    partial: Partial,
    given: ScanInput,
    shard: Shard,
    save_seconds: float,
    interrupts: Interrupts,
    progress: Reporter,
) -> None:
    slots = given.order.slots(shard.number, shard.count)
    scan = partial.load(shard.number, shard.count)
    if scan is None:
        scan = Scan.empty(given, slots.start)
        if given.options.positions is not None:
            scan.spool = partial.spool(shard.number, shard.count, given.head.width, ())
    documents, tokens = split_counts(given.corpus, given.options.split)
    left = (tokens - documents) * len(slots) // given.order.count - scan.tokens
    saved, cost = time.monotonic(), 0.0
    with progress.task("Indexing", max(left, 0), "tokens") as task:
        if scan.tokens:
            task.note(f"{scan.tokens:,} tokens were scanned before")
        for done in scan_passes(scan, given, slots.stop):
            task.advance(done)
            stopped = interrupts.received
            began = time.monotonic()
            due = began - saved >= max(save_seconds, cost / SAVE_SHARE) or save_seconds == 0
            full = scan.spool is not None and scan.spool.full
            if stopped or due or full:
                # Sorting what waits would come on top of it.
                return_freed_memory()
            if stopped or due:
                partial.save(scan, shard.number, shard.count, complete=False)
                saved = time.monotonic()
                cost = saved - began
            elif full and scan.spool is not None:
                # What is behind the last save is cut off where a killed run goes on.
                with partial.writing("what was scanned"):
                    scan.spool.flush()
            if stopped:
                interrupts.stop()
    scan.finish_shard(given.order)
    partial.save(scan, shard.number, shard.count, complete=True)


def _finish(
    partial: Partial,
    given: ScanInput,
    shard: Shard,
    meta: dict[str, Any],
    progress: Reporter,
) -> Path | None:
    while shard.finishes and len(partial.complete(shard.count)) < shard.count:
        time.sleep(WAIT_SECONDS)
    if shard.finishes is False:
        return None
    with partial.finishing() as unfinished:
        if not unfinished:
            return partial.out
        if len(partial.complete(shard.count)) < shard.count:
            return None
        scan = partial.load(0, shard.count)
        assert scan is not None
        spools = [scan.spool]
        for number in range(1, shard.count):
            other = partial.load(number, shard.count)
            assert other is not None
            scan.merge(other)
            spools.append(other.spool)
        on_cpu = given.model.device.type == "cpu"
        freeing = returning_freed_memory() if on_cpu else nullcontext()
        with partial.staging() as directory, freeing:
            write_lens(directory, given, scan, spools, meta, progress)
    return partial.out


def check_lens(out: Path, *, overwrite: bool) -> None:
    """Check that a lens may be written to a directory, unless one has only to be put there.

    Raises:
        InputError: there is a lens and it is not to be replaced, or something else is there.
    """
    if Partial(out).finished() or not out.exists():
        return
    if not overwrite:
        raise InputError(f"{out} exists. Choose another --lens, or pass --overwrite to replace it.")
    if any(out.iterdir()) and not (out / layout.META_FILE).is_file():
        raise InputError(f"{out} is not a lens, so it is not replaced: choose another --lens.")


def check_index(
    model: PreTrainedModel, corpus: Corpus, options: IndexOptions, tokenizer: str | None = None
) -> None:
    """Check that a corpus and options suit a model, before anything is read.

    Raises:
        InputError: an empty split, other tokens than the model's, or a window it cannot read.
    """
    if split_counts(corpus, options.split)[0] == 0:
        raise InputError(
            f"the corpus {corpus.name} has no documents in its {options.split} split: "
            "index --split all, or build it with `prismlm corpus build` and another --heldout "
            "share."
        )
    check_window_and_batches(model, options)
    if tokenizer is not None and tokenizer != corpus.meta["tokenizer"]["fingerprint"]:
        raise InputError(
            f"the corpus {corpus.name} was tokenised with another tokenizer than the model's: "
            "build the corpus with --tokenizer MODEL."
        )
    if len(corpus.tokenizer) > weight_of(model).shape[0]:
        # Tokens that were added to a model without embeddings hurt nobody until a text has them.
        largest = [int(part.max()) for part in corpus.parts()]
        check_embedded(model, corpus.tokenizer, largest, str(model.name_or_path))


def check_window_and_batches(model: PreTrainedModel, options: IndexOptions) -> None:
    """Check the options that no corpus is needed for.

    Raises:
        InputError: a window that the model cannot read, or batches without tokens.
    """
    check_share(options.positions)
    check_codes(options.codes)
    if options.tokens_per_batch < 1:
        raise InputError(f"batches of {options.tokens_per_batch} tokens: expected at least 1.")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and options.window > longest:
        raise InputError(
            f"a window of {options.window} tokens does not fit a model that reads {longest}: "
            f"pass --window {longest} or less."
        )
