"""One streaming pass over a corpus: which text each prototype stands for, and how much of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.allocator import keep_freed_memory
from prismlm.corpus.windows import split_counts
from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.errors import InputError
from prismlm.files import atomic_directory, check_room, discard, room_to_write, share, write_json
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.codes import check_codes
from prismlm.lens.opened_model import check_embedded
from prismlm.lens.scan import IndexOptions, Scan, ScanInput, scan_passes
from prismlm.lens.states import HiddenStates
from prismlm.lens.write import lens_bytes, write_lens
from prismlm.models.evaluating import evaluating
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import Interrupts, check_same, read_note, writing

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

RUN_FILE = "run.json"
# What the record of a lens says elsewhere, or not.
NOT_OF_A_LENS = ("model", "shards", "positions", "codes", "states")
SECONDS_MEASURED = 10.0


def build_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    out: Path | str,
    options: IndexOptions | None = None,
    *,
    trained_on: layout.TrainedOn = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    states: HiddenStates | None = None,
    progress: Reporter = SILENT,
) -> Path | None:
    """Index a corpus, or one part of it, and write a lens directory.

    Every position that predicts a token of its document is scored against every prototype. The
    L nearest positions of each prototype are kept, one per document, ranked by cosine, then by
    position; uses and activations are summed over all positions.

    Parts are indexed at any time, and each is kept beside the lens, in ``.NAME.partial``, when it
    is finished. The last one writes the lens, the one of an undivided index if the machines compute
    the same cosines.

    Args:
        model: the causal language model.
        head: its prototype head.
        corpus: the text; any corpus, also one the model was not trained on.
        out: the lens directory.
        options: how it is read, and which part of it.
        trained_on: whether the model was trained on this corpus, if that is known.
        tokenizer: the fingerprint of the model's tokenizer, to be checked against the corpus's.
        overwrite: replace an existing lens, and discard parts that were made with other inputs.
        states: of the same model, corpus, split, window and stride, which are not read again.
        progress: shows tokens done.

    Returns:
        The lens, or None if another process writes it.

    Raises:
        InputError: the lens exists, another process writes it, its parts are of other inputs, or
            corpus and options do not suit the model.
        FormatError: the corpus is damaged.
        PrismError: the disk is full or failing.
        Interrupted: SIGINT or SIGTERM came; finished parts are kept.
    """
    options, out = options or IndexOptions(), Path(out)
    shard = options.shard
    check_index(model, corpus, options, tokenizer)
    check_lens(out, overwrite=overwrite)
    given, parts = ScanInput(model, head, corpus, options, states), Parts(out, shard.count)
    documents, tokens = split_counts(corpus, options.split)
    expected = lens_bytes(head, options, documents, tokens - documents)
    check_room(f"the lens {out}", out, expected, parts.path)
    run = _run(given)
    if model.device.type == "cpu":
        keep_freed_memory()
    room = room_to_write(f"the lens {out}", out.parent, lambda: f"Make room. {parts.kept()}")
    with evaluating(model), Interrupts(parts.kept) as interrupts, room:
        interrupts.now = True
        parts.check(run, overwrite=overwrite)
        # Another process may have written it in the meantime.
        check_lens(out, overwrite=overwrite)
        part = parts.part(shard.number)
        with writing(part):
            if not part.is_dir():
                with atomic_directory(part) as directory:
                    write_json(directory / RUN_FILE, run)
                    _scan(given, directory, progress)
        if len(parts.complete()) < shard.count:
            return None
        parts.check(run)
        with writing(parts.path, wait=True):
            if not parts.path.is_dir():  # another process has written the lens
                return None
            check_lens(out, overwrite=overwrite)
            with writing(out), atomic_directory(out) as directory:
                _write(directory, given, parts, run, trained_on, progress)
            discard(parts.path)
    return out


class Parts:
    """The finished parts of a lens, in the directory ``.NAME.partial`` beside it.

    Each has a file ``run.json`` that says what it is of.
    """

    def __init__(self, out: Path, count: int) -> None:
        self.out, self.count = out, count
        self.path = out.with_name(f".{out.name}.partial")

    def part(self, number: int) -> Path:
        """Return the directory of a part."""
        return self.path / f"part-{number:05d}-of-{self.count:05d}"

    def complete(self) -> list[int]:
        """Return which parts are finished."""
        return [number for number in range(self.count) if self.part(number).is_dir()]

    def kept(self) -> str:
        """Say what an interrupted run has left."""
        if any(self.path.glob("part-*")):
            return f"Finished parts are kept in {self.path}. Run the same command again to resume."
        return "No part was finished: the same command begins anew."

    def check(self, run: dict[str, Any], *, overwrite: bool = False) -> None:
        """Check that finished parts are of the same run; with ``overwrite`` discard the others."""
        # Not while another process writes the lens.
        with writing(self.path, wait=True):
            for part in self.path.glob("part-*"):
                noted = part / RUN_FILE
                # Earlier versions noted it elsewhere: such a part may be of anything.
                before = read_note(noted, self.path) if noted.is_file() else {}
                if overwrite and before != run:
                    discard(part)
                    continue
                check_same(
                    f"an index of {self.out} was begun with another input",
                    before,
                    run,
                    "Resume that one, choose another --lens, or discard its parts with "
                    "--overwrite.",
                )


def _run(given: ScanInput) -> dict[str, Any]:
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
        "shards": options.shard.count,
    }
    if given.states is not None:
        given.states.check(run)
        run["states"] = given.states.fingerprint
    return run


def _scan(given: ScanInput, directory: Path, progress: Reporter) -> None:
    """Read the blocks of a part, and write what was found."""
    shard = given.options.shard
    slots = given.order.slots(shard.number, shard.count)
    documents, tokens = split_counts(given.corpus, given.options.split)
    share_of_all = len(slots) / given.order.count
    with progress.task("Indexing", round((tokens - documents) * share_of_all), "tokens") as task:
        scan = Scan.empty(given, directory)
        for done in scan_passes(scan, given, slots):
            task.advance(done)
    scan.save(directory)


def _write(
    directory: Path,
    given: ScanInput,
    parts: Parts,
    run: dict[str, Any],
    trained_on: layout.TrainedOn,
    progress: Reporter,
) -> None:
    """Merge the parts and write the lens of all."""
    corpus, options = given.corpus, given.options
    scans = [Scan.load(parts.part(number), given.head.width) for number in range(parts.count)]
    for other in scans[1:]:
        scans[0].merge(other)
    meta = {
        **{key: value for key, value in run.items() if key not in NOT_OF_A_LENS},
        "corpus_name": corpus.name,
        "corpus_path": str(corpus.path.resolve()),
        "trained_on": trained_on,
        "documents": split_counts(corpus, options.split)[0],
        "with_text": options.with_text,
    }
    write_lens(directory, given, scans[0], [scan.spool for scan in scans], meta, progress)
    share(directory)


def check_lens(out: Path, *, overwrite: bool) -> None:
    """Check that a lens may be written to a directory; InputError if not."""
    if not out.exists():
        return
    if not overwrite:
        raise InputError(f"{out} exists. Choose another --lens, or pass --overwrite to replace it.")
    if any(out.iterdir()) and not (out / layout.META_FILE).is_file():
        raise InputError(f"{out} is not a lens, so it is not replaced: choose another --lens.")


def check_index(
    model: PreTrainedModel, corpus: Corpus, options: IndexOptions, tokenizer: str | None = None
) -> None:
    """Check that a corpus and options suit a model, before anything is read; InputError if not."""
    if split_counts(corpus, options.split)[0] == 0:
        raise InputError(
            f"the corpus {corpus.name} has no documents in its {options.split} split: "
            "index --split all, or build it with `prismlm corpus build` and another --heldout "
            "share."
        )
    check_options(model, options)
    if tokenizer is not None and tokenizer != corpus.meta["tokenizer"]["fingerprint"]:
        raise InputError(
            f"the corpus {corpus.name} was tokenised with another tokenizer than the model's: "
            "build the corpus with --tokenizer MODEL."
        )
    if len(corpus.tokenizer) > weight_of(model).shape[0]:
        # Tokens that were added to a model without embeddings hurt nobody until a text has them.
        largest = [int(part.max()) for part in corpus.parts()]
        check_embedded(model, corpus.tokenizer, largest, str(model.name_or_path))


def check_options(model: PreTrainedModel, options: IndexOptions) -> None:
    """Check the options that no corpus is needed for; InputError if one cannot be used."""
    check_share(options.positions)
    check_codes(options.codes)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and options.window > longest:
        raise InputError(
            f"a window of {options.window} tokens does not fit a model that reads {longest}: "
            f"pass --window {longest} or less."
        )


def check_share(share: float) -> float:
    """Return a share of positions; InputError unless it is above 0 and up to 1."""
    if not 0 < share <= 1:  # NaN is refused too
        raise InputError(
            f"--positions is {share:g}: expected a share of the corpus's positions above 0 and up "
            "to 1."
        )
    return share


def estimate_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    options: IndexOptions | None = None,
    scale: float | None = 1.0,
) -> Cost:
    """Time some passes of what ``build_index`` with the same arguments would do, and multiply.

    The figures are ``documents`` to read, ``tokens`` to predict and ``tokens_per_second``. There
    is ``scale`` times as much text as in ``corpus``; None: not known.
    """
    options = options or IndexOptions()
    check_index(model, corpus, options)
    given = ScanInput(model, head, corpus, options)
    with evaluating(model), TemporaryDirectory() as directory:
        scan = Scan.empty(given, Path(directory))
        passes = scan_passes(scan, given, range(given.order.count))
        rate = rate_of(passes, SECONDS_MEASURED, enough=2**14) or 1e4
    counted = split_counts(corpus, options.split)
    documents, tokens = (None if scale is None else round(scale * each) for each in counted)
    if tokens is not None and documents is not None:
        tokens -= documents
    return Cost(
        None if tokens is None else tokens / rate,
        peak_memory(model.device.type),
        lens_bytes(head, options, documents, tokens),
        {"documents": documents, "tokens": tokens, "tokens_per_second": rate},
        basis="Measured on a few passes.",
    )
