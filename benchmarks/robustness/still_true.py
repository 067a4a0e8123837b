"""Is an answer still about this model, lens and corpus? What changed since, refused or right.

    python -m benchmarks.robustness.still_true

makes a small Mistral with a head, a lens and its corpus, changes one thing at a time on disk, opens
the model and asks it. Two thirds of the changes come before it is opened, the others between
opening and asking.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus, build_corpus, sample_path
from prismlm.errors import PrismError
from prismlm.explain.attribution import Method
from prismlm.explain.language_model import PrismLM
from prismlm.explain.trace import Trace
from prismlm.files import read_json, write_json
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.labels.write import label_lens, write_columns
from prismlm.lens.lens import Lens
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import Sidecar, base_of, load_sidecar, save_sidecar

DOCUMENTS, CHARACTERS, VOCABULARY = 24, 400, 320
WIDTH, LAYERS, PROTOTYPES, SLIDING = 32, 2, 48, 24
OTHER_LENS = "other-lens"
LENS, WEIGHTS = "model/lens/sample", "model/model.safetensors"
CONFIG, TOKENIZER = "model/config.json", "model/tokenizer.json"
ASKED = "The heart is a muscle that pumps blood through the body of most animals"
OPTIONS = IndexOptions(contexts=4, window=64, stride=48, split="all")
# How much shares may move where the same weights are computed in half precision.
HALF = 0.05


def make(trees: Path) -> Path:
    """Write ``plain``, and ``adapted``, the same with an adapter beside the model's weights."""
    (trees / "plain").mkdir()
    make_plain(trees / "plain")
    adapted = shutil.copytree(trees / "plain", trees / "adapted")
    adapter(adapted)
    indexed(adapted)
    return trees


def make_plain(root: Path) -> None:
    """Write a corpus and another one of the same tokens, and a model with a lens of the first."""
    table = pq.read_table(sample_path())
    rows = table.take(list(range(0, len(table), len(table) // (2 * DOCUMENTS)))).to_pylist()
    tokenizer: Any = None
    for name, part in (("corpus", rows[::2]), ("other", rows[1::2])):
        texts = [row | {"text": row["text"][:CHARACTERS]} for row in part]
        pq.write_table(pa.Table.from_pylist(texts, schema=table.schema), root / "texts.parquet")
        how: dict[str, Any] = {"tokenizer": tokenizer} if tokenizer else {"vocab_size": VOCABULARY}
        corpus = build_corpus(root / "texts.parquet", root / name, **how)
        tokenizer = tokenizer or corpus.path / "tokenizer"
    (root / "texts.parquet").unlink()
    corpus = Corpus.open(root / "corpus")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(corpus.tokenizer), hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=SLIDING, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=corpus.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    head = PrototypeHead(WIDTH, PROTOTYPES, 4)
    with torch.no_grad(), capture(model) as seen:
        model(input_ids=torch.from_numpy(corpus.tokens(0, 5 * PROTOTYPES).astype("int64"))[None])
    head.place_on(seen.z[0, ::5])
    model.save_pretrained(root / "model")
    corpus.tokenizer.save_pretrained(root / "model")
    save_sidecar(root / "model", Sidecar(head, LogitMap.of(model), base_of(model), {}))
    for read, lens in ((corpus, LENS), (Corpus.open(root / "other"), OTHER_LENS)):
        build_index(model, head, read, root / lens, OPTIONS, trained_on=True)


# -- what is asked


def answer(lm: PrismLM, trace: Trace | None = None) -> dict[str, Any]:
    """Return what is said of a text: shares to the last bit, and what their places are called."""
    trace = trace or lm.explain(ASKED, generate=4)
    passages, lens = trace.passages(5), lm.lens
    sources = {method: trace.sources(by="source", method=method) for method in get_args(Method)}
    return {
        "shares": {
            f"{one.key} by {method}": one.share.hex()
            for method, attribution in sources.items()
            for one in attribution.items
        },
        "unattributed": [attribution.unattributed.hex() for attribution in sources.values()],
        "passages": [[one.doc_id, one.position, one.share.hex()] for one in passages],
        "text": [None if lens is None else lens.sentence(one.position) for one in passages],
        "support": None if trace.support is None else str(trace.support),
        "names": [one.name for one in trace[-1].prototypes],
    }


Changes = Callable[[Path], Any]
Kept = Sequence[str]
ALL: Kept = ("shares", "unattributed", "passages", "support", "names")


@dataclass(frozen=True)
class Variant:
    """One thing that has changed since indexing, made by ``change`` in a directory of :func:`make`.

    ``right`` are the parts of the answer that stay to the last bit; None: it is to be refused. The
    model was ``opened`` before the change, or also ``asked`` before and asked for passages after.
    ``adapted``: the model has an adapter. ``near``: shares may move by rounding of half precision.
    """

    group: str
    name: str
    change: Changes
    right: Kept | None = None
    opened: bool = False
    asked: bool = False
    adapted: bool = False
    near: bool = False


def outcome(variant: Variant, trees: Path, at: Path) -> dict[str, Any]:
    """Change a copy of a directory and ask; return what came of it, and whether it was to be."""
    tree = trees / ("adapted" if variant.adapted else "plain")
    expected = _unchanged(tree)
    shutil.copytree(tree, at)
    _move_corpus(at / LENS, at / "corpus")
    lm = prismlm.load(at / "model") if variant.opened or variant.asked else None
    trace = lm.explain(ASKED, generate=4) if lm is not None and variant.asked else None
    says = ""
    try:
        variant.change(at)
        result = answer(lm or prismlm.load(at / "model"), trace)
    except PrismError as error:
        came, says = "refused", str(error).replace(str(at), "…")
    else:
        came = "right" if _same(result, expected, variant) else "another answer, without a word"
    wanted = "refused" if variant.right is None else "right"
    return {
        "group": variant.group,
        "name": variant.name,
        "wanted": wanted,
        "outcome": came,
        "says": says,
        "near": variant.near,
        "fine": came == wanted,
    }


@cache
def _unchanged(tree: Path) -> dict[str, Any]:
    return answer(prismlm.load(tree / "model"))


def _same(result: dict[str, Any], expected: dict[str, Any], variant: Variant) -> bool:
    if variant.near:
        keys = result["shares"].keys() | expected["shares"].keys()
        pairs = [
            [float.fromhex(one["shares"].get(k, "0")) for one in (result, expected)] for k in keys
        ]
        return all(abs(left - right) <= HALF for left, right in pairs)
    # Without the corpus at hand passages have no text, and never another's.
    told = result["text"] in (expected["text"], [None] * len(expected["text"]))
    return told and all(result[key] == expected[key] for key in variant.right or ALL)


def _move_corpus(lens: Path, corpus: Path) -> None:
    """Note where a copied corpus lies now, as whoever moves one has to."""
    layout.write_meta(lens, _with(layout.read_meta(lens), corpus_path=str(corpus)))


def _with(meta: layout.LensMeta, **values: Any) -> layout.LensMeta:
    return layout.LensMeta(**(vars(meta) | values))


# -- changes


def json_values(name: str) -> Callable[..., Changes]:
    """Return a function that sets values in a JSON file; a missing file is created."""

    def setter(**values: Any) -> Changes:
        def change(root: Path) -> None:
            before = read_json(root / name) if (root / name).is_file() else {}
            write_json(root / name, before | values)

        return change

    return setter


config = json_values(CONFIG)
adapter_config = json_values("model/adapter_config.json")
generation = json_values("model/generation_config.json")
head_settings = json_values("model/prismlm.json")
meta = json_values(f"{LENS}/{layout.META_FILE}")


def edit_tensors(name: str) -> Callable[[Callable[[dict[str, torch.Tensor]], Any]], Changes]:
    """Return a function that edits a safetensors file, in place or by returning new tensors."""

    def editor(work: Callable[[dict[str, torch.Tensor]], Any]) -> Changes:
        def change(root: Path) -> None:
            tensors = load_file(root / name)
            edited = work(tensors)
            tensors = edited if isinstance(edited, dict) else tensors
            save_file(tensors, root / name, metadata={"format": "pt"})

        return change

    return editor


weights = edit_tensors(WEIGHTS)
head = edit_tensors("model/prototype_head.safetensors")


def mlp(rows: slice, layers: Sequence[int] = range(LAYERS)) -> Changes:
    """Zero neurons of MLPs."""

    def work(tensors: dict[str, torch.Tensor]) -> None:
        for layer in layers:
            tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, rows] = 0

    return weights(work)


def scaled(name: str, factor: float) -> Changes:
    """Multiply the weights whose names contain a word."""
    return weights(lambda t: {k: v * factor if name in k else v for k, v in t.items()})


def entry(name: str, work: Callable[[torch.Tensor], Any]) -> Changes:
    """Change one tensor in place."""
    return weights(lambda tensors: work(tensors[name]))


def as_type(dtype: torch.dtype) -> Changes:
    """Write the same weights in another dtype."""

    def change(root: Path) -> None:
        weights(lambda t: {k: v.to(dtype) for k, v in t.items()})(root)
        config(dtype=str(dtype).removeprefix("torch."))(root)

    return change


def rounded(bits: int) -> Changes:
    """Round every matrix of the layers to this many bits per row, as quantisation does."""
    levels = 2 ** (bits - 1) - 1

    def work(tensors: dict[str, torch.Tensor]) -> None:
        for name, matrix in tensors.items():
            if matrix.ndim == 2 and "layers" in name:
                step = matrix.abs().amax(1, keepdim=True) / levels
                matrix.copy_((matrix / step).round() * step)

    return weights(work)


def resharded(root: Path) -> None:
    """Write the weights in many files."""
    model, _ = read_checkpoint(root / "model")
    (root / WEIGHTS).unlink()
    model.save_pretrained(root / "model", max_shard_size="20KB")


def other_weights(root: Path) -> None:
    """Draw the matrices of the layers again."""
    generator = torch.Generator().manual_seed(9)

    def work(tensors: dict[str, torch.Tensor]) -> None:
        for name, matrix in tensors.items():
            if "layers" in name and matrix.ndim == 2:
                matrix.copy_(0.2 * torch.randn(matrix.shape, generator=generator))

    weights(work)(root)


def adapter(root: Path) -> None:
    """Put an adapter of rank 2 beside the weights."""
    from peft import LoraConfig, get_peft_model

    model, _ = read_checkpoint(root / "model")
    torch.manual_seed(1)
    modules = ["q_proj", "v_proj"]
    lora: Any = LoraConfig(r=2, lora_alpha=4, target_modules=modules, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(root / "model")


def gone(*names: str) -> Changes:
    """Remove files or directories."""

    def change(root: Path) -> None:
        for name in names:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def rebuild(root: Path, corpus: str = "corpus", options: IndexOptions = OPTIONS) -> None:
    """Build the lens again with the model as it is, from a corpus, with these options."""
    model, _ = read_checkpoint(root / "model")
    texts, lens = Corpus.open(root / corpus), root / LENS
    prototypes = load_sidecar(root / "model").head
    build_index(model, prototypes, texts, lens, options, overwrite=True, trained_on=True)


def from_other(*names: str) -> Changes:
    """Replace files of the lens by those of the other corpus's lens."""

    def change(root: Path) -> None:
        for name in names:
            (root / LENS / name).unlink()
            shutil.copyfile(root / OTHER_LENS / name, root / LENS / name)

    return change


def text_begun(root: Path) -> None:
    """Have the tokenizer put its end of text before each text, too."""
    mark = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    processor = {
        "type": "TemplateProcessing", "single": [mark, text], "pair": [mark, text, text],
        "special_tokens": {"<|endoftext|>": special},
    }  # fmt: skip
    json_values(TOKENIZER)(post_processor=processor)(root)


def tokens_swapped(root: Path) -> None:
    """Swap two tokens of the vocabulary."""
    tokenizer = read_json(root / TOKENIZER)
    words = tokenizer["model"]["vocab"]
    first, second = sorted(words, key=words.get)[40:42]
    words[first], words[second] = words[second], words[first]
    write_json(root / TOKENIZER, tokenizer)


def chat_template(root: Path) -> None:
    """Give the model another chat template."""
    (root / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def cut(name: str) -> Changes:
    """Cut a file in half."""

    def change(root: Path) -> None:
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[: len(data) // 2])

    return change


def opened(root: Path) -> tuple[PrismLM, Lens]:
    """Return the model and its lens."""
    lm = prismlm.load(root / "model")
    assert lm.lens is not None
    return lm, lm.lens


def labelled(root: Path) -> None:
    """Name the prototypes, as ``prismlm label`` does."""
    lm, lens = opened(root)
    label_lens(lens, lm.model, overwrite=True)


def mapped(root: Path) -> None:
    """Give the prototypes coordinates on a map."""
    points = [float(number) for number in range(PROTOTYPES)]
    write_columns(opened(root)[1], {"x": points, "y": points}, map={"method": "by hand"})


def corpus_rebuilt(root: Path) -> None:
    """Replace the corpus that was indexed by the other one."""
    shutil.rmtree(root / "corpus")
    shutil.copytree(root / "other", root / "corpus")


def without_peft(root: Path) -> None:
    """Ask in a process without PEFT."""
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "import prismlm\n"
        f"prismlm.load({str(root / 'model')!r}).explain('A')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    last = process.stderr.strip().splitlines()[-1] if process.returncode else ""
    if "prismlm.errors" in last:
        raise PrismError(last.partition(": ")[2])


def rope(**values: Any) -> Changes:
    """Change how positions are turned into angles."""
    return config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | values)


def architecture(kind: str) -> Changes:
    """Read the same weights as a model of another family."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    return config(model_type=kind, architectures=[names[kind]])


OTHER_WINDOWS = replace(OPTIONS, window=32, stride=16)
indexed = rebuild
of_other = partial(rebuild, corpus="other")
of_other_windows = partial(rebuild, options=OTHER_WINDOWS)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
OTHER_MAP = {"scale": 2.0, "bias": False, "softcap": None}
TABLES = (layout.INDEX_FILE, *layout.CELL_FILES, layout.CELL_DOCUMENTS_FILE)
ADAPTER_FILES = ("model/adapter_config.json", "model/adapter_model.safetensors")
NORM, EMBEDDING, OUTPUT = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
VARIANTS = (
    Variant("nothing", "nothing", lambda _: None, ALL),
    Variant("weights", "all but 2 of 64 neurons of every MLP zeroed", mlp(slice(2, None))),
    Variant("weights", "4 of 64 neurons of one MLP zeroed", mlp(slice(4), [1])),
    Variant("weights", "one attention output zeroed", scaled("layers.0.self_attn.o_proj", 0)),
    Variant("weights", "the layers' weights drawn anew", other_weights),
    Variant("weights", "all weights of layers × 1.01", scaled("layers", 1.01)),
    Variant("weights", "final norm zeroed", scaled(NORM, 0)),
    Variant("weights", "final norm × 2", scaled(NORM, 2)),
    Variant("weights", "a NaN in a layer", entry(DOWN, lambda t: t[0, 0].fill_(float("nan")))),
    Variant("weights", "one weight + 1", entry(DOWN, lambda t: t[0, 0].add_(1.0))),
    Variant("weights", "a row of the output embedding × 2", entry(OUTPUT, lambda t: t[7].mul_(2))),
    Variant("weights", "input embeddings × 1.1", scaled(EMBEDDING, 1.1)),
    Variant("weights", "rounded to 8 bits", rounded(8)),
    Variant("weights", "rounded to 4 bits", rounded(4)),
    Variant("weights", "in many files", resharded, ALL),
    Variant("weights", "written again in float64", as_type(torch.float64), ALL, near=True),
    Variant("weights", "written again in bfloat16", as_type(torch.bfloat16), ALL, near=True),
    Variant("weights", "one weight + 1e-9",
            entry(DOWN, lambda t: t[0, 0].add_(1e-9)), ALL, near=True),
    Variant("configuration", "hidden_act silu → gelu", config(hidden_act="gelu")),
    Variant("configuration", "rms_norm_eps 1e-6 → 1e-5", config(rms_norm_eps=1e-5)),
    Variant("configuration", "rope_theta × 2", rope(rope_theta=2e4)),
    Variant("configuration", "RoPE scaled linearly", rope(rope_type="linear", factor=4.0)),
    Variant("configuration", "2 heads of 16 in place of 4 of 8", config(**HEADS)),
    Variant("configuration", "sliding_window 24 → 12", config(sliding_window=12)),
    Variant("configuration", "sliding_window off", config(sliding_window=None)),
    Variant("configuration", "a layer fewer", config(num_hidden_layers=1)),
    Variant("configuration", "tied embeddings, where both are in the files",
            config(tie_word_embeddings=True), ALL),
    Variant("configuration", "another architecture: Llama", architecture("llama")),
    Variant("configuration", "another architecture: Qwen2", architecture("qwen2")),
    Variant("configuration", "attention_dropout, which is off", config(attention_dropout=0.3), ALL),
    Variant("configuration", "initializer_range", config(initializer_range=0.01), ALL),
    Variant("configuration", "use_cache", config(use_cache=False), ALL),
    Variant("configuration", "dtype: bfloat16", config(dtype="bfloat16"), ALL, near=True),
    Variant("adapters", "added after indexing", adapter),
    Variant("adapters", "lora_alpha 4 → 400", adapter_config(lora_alpha=400), adapted=True),
    Variant("adapters", "lora_alpha 4 → 4.4", adapter_config(lora_alpha=4.4), adapted=True),
    Variant("adapters", "removed", gone(*ADAPTER_FILES), adapted=True),
    Variant("adapters", "its weights alone removed", gone(ADAPTER_FILES[1]), adapted=True),
    Variant("adapters", "its configuration alone removed", gone(ADAPTER_FILES[0]), adapted=True),
    Variant("adapters", "applied to other modules",
            adapter_config(target_modules=["k_proj"]), adapted=True),
    Variant("adapters", "PEFT is not installed", without_peft, adapted=True),
    Variant("adapters", "unchanged", lambda _: None, ALL, adapted=True),
    Variant("generation", "num_beams 4", generation(num_beams=4), ALL),
    Variant("generation", "repetition_penalty 1.8", generation(repetition_penalty=1.8), ALL),
    Variant("generation", "no_repeat_ngram_size 1", generation(no_repeat_ngram_size=1), ALL),
    Variant("generation", "suppress_tokens", generation(suppress_tokens=[*range(1, 200)]), ALL),
    Variant("generation", "do_sample, temperature 9",
            generation(do_sample=True, temperature=9.0, top_k=0), ALL),
    Variant("generation", "min_new_tokens, max_length 5",
            generation(min_new_tokens=9, max_length=5), ALL),
    Variant("tokenizer", "two tokens swapped", tokens_swapped),
    Variant("tokenizer", "puts a token before each text", text_begun),
    Variant("tokenizer", "another chat template, for a plain text", chat_template, ALL),
    Variant("head", "prototypes × 50", head(lambda t: t["prototypes"].mul_(50))),
    Variant("head", "prototypes zeroed", head(lambda t: t["prototypes"].zero_())),
    Variant("head", "τ × 2", head(lambda t: t["scale"].mul_(2))),
    Variant("head", "another k", head_settings(prototypes_per_token=5)),
    Variant("head", "another logit map", head_settings(logit_map=OTHER_MAP)),
    Variant("lens", "names of another lens with the same K", from_other(layout.PROTOTYPES_FILE)),
    *(
        Variant("lens", f"{name} of another lens", from_other(name))
        for name in (
            layout.INDEX_FILE, layout.CELL_DOCUMENTS_FILE,
            "probe.safetensors", "suffixes-documents.npy", layout.META_FILE,
        )
    ),
    Variant("lens", "all cells of another lens", from_other(*layout.CELL_FILES)),
    Variant("lens", "meta.json edited by hand", meta(trained_on=False)),
    Variant("lens", "of an older format", meta(format_version=2)),
    Variant("lens", "the probe removed", gone(f"{LENS}/probe.safetensors")),
    Variant("lens", "the probe cut off", cut(f"{LENS}/probe.safetensors")),
    Variant("lens", "labelled", labelled, ALL[:-1]),
    Variant("lens", "mapped", mapped, ALL),
    Variant("corpus", "removed", gone("corpus"), ALL),
    Variant("corpus", "another one in its place", corpus_rebuilt, ALL),
    Variant("open model", "lens rebuilt from another corpus", of_other, opened=True),
    Variant("open model", "the same, passages of an answer before", of_other, asked=True),
    Variant("open model", "lens rebuilt with other windows", of_other_windows, opened=True),
    Variant("open model", "lens rebuilt, the same", indexed, ALL, opened=True),
    Variant("open model", "lens removed", gone(LENS), opened=True),
    Variant("open model", "names of another lens", from_other(layout.PROTOTYPES_FILE), opened=True),
    Variant("open model", "all files of another lens but meta.json",
            from_other(*TABLES), opened=True),
    Variant("open model", "labelled", labelled, ALL[:-1], opened=True),
    Variant("open model", "mapped, passages of an answer before", mapped, ALL, asked=True),
    Variant("open model", "corpus rebuilt from other documents", corpus_rebuilt, ALL, asked=True),
    Variant("open model", "corpus removed", gone("corpus"), ALL, asked=True),
    Variant("open model", "weights replaced in the files", other_weights, ALL, opened=True),
)  # fmt: skip


def main() -> int:
    """Try everything and write the result; exit 1 where something was answered wrongly."""
    parser = script_options(__doc__, RESULTS / "robustness_still_true.json")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "trees").mkdir()
        trees = make(work / "trees")
        variants = [outcome(one, trees, work / f"{n}") for n, one in enumerate(VARIANTS)]
    result = {"environment": environment(), "variants": variants}
    write_json(args.out, result)
    wrong = [one["name"] for one in variants if not one["fine"]]
    print("\n".join(wrong) or "all refused or right")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
