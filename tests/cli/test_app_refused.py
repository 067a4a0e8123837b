"""Bad input: a message that says what was expected, exit code 2, and nothing is written."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

import prismlm
from prismlm.cli.app import app
from prismlm.corpus import Corpus
from prismlm.models.uncertainty_feedback import save_uncertainty
from tests.helpers import forked
from tests.helpers.chats import CHAT, chatting
from tests.helpers.eval_data import save_glue_model, write_benchmarks, write_toy
from tests.helpers.mixer_models import save_model
from tests.helpers.small_models import make_fed_gpt2

FULL = "/dev/full"
NESTED = "[" * 100_000 + "]" * 100_000
NO_LENGTH = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
FILES = {
    "bad.jsonl": '{"text": "whole"}\n{"text": "ha',
    "texts.jsonl": '{"text": "The court ruled that the contract was void."}\n',
    "chats.jsonl": json.dumps({"messages": CHAT}) + "\n",
    "few.txt": "one text\nanother text\n",
    "many.jsonl": "".join(json.dumps({"text": f"The text {n}"}) + "\n" for n in range(40)),
    "task.jsonl": '{"prompt": "The", "chosen": "first", "rejected": "second"}\n',
    "boxes.jsonl": '{"concept": "b", "context": "The river carries a", "target": "box"}\n',
    "long.txt": "word " * 600,
    "empty.txt": "",
    "rows.jsonl": "mine",
    "c.safetensors": "mine",
}
AUDIT, INDEX = "audit model texts.jsonl", "index model --corpus corpus --lens new"
BUILD, ATTACH = "corpus build texts.jsonl --out new", "attach model --corpus corpus --out new"
STEER, EXPLAIN, GENERATE = (f"{name} model 'The drug'" for name in ("steer", "explain", "generate"))
CALIBRATE, OTHER = "calibrate model --task task.jsonl --out", "--controller other.safetensors"
SUPPRESS = "suppress model --examples many.jsonl --phrase the --out new.safetensors"
WHAT_IF, EFFECT = "what-if model 'The cell'", "inspect interventions studied/protot"
SUITE, GLUE = "eval model --data data --out ../kept", "eval glue words --data glue --out ../kept"
JUDGE, ENDPOINT = "eval judge m --prompts f", "--endpoint http://host/v1"
FEEDBACK = "inspect uncertainty-feedback"
REFUSED = [
    # What is read.
    ("audit model bad.jsonl", "bad.jsonl:2 is not valid JSON"),
    ("audit model cut.parquet", "damaged or incomplete"),
    ("audit model chats.jsonl", "chats.jsonl:1.*chat template"),
    (f"{AUDIT} --where licence=CC0", "Did you mean 'license'"),
    (f"{AUDIT} --where license=none", "no text of this lens has"),
    (f"{AUDIT} --window 1000000", "does not fit"),
    (f"{AUDIT} --text-column words", "no column 'words'"),
    (f"{AUDIT} --workers 2", "add --parquet"),
    ("sources model --doc 'no such'", "has no document 'no such'"),
    ("compare model .", r"`prismlm attach` \(from a Hugging Face model\)"),
    ("explain model", "--file.*neither"),
    ("explain model --file latin.txt", "latin.txt.*UTF-8.*0xe9.*position 1"),
    ("explain model --file empty.txt", "empty.txt is empty"),
    ("explain model --file long.txt", "reads 512"),
    ("explain model --file chats.jsonl", "chats.jsonl:1.*chat template"),
    ("explain chat --file chats.jsonl --system 'Be brief.'", "only chats"),
    ("explain none text", "none"),
    ("explain nested text", "nested cannot be read"),
    ("explain odd text", "chunk size must be non-zero"),
    ("explain . text", "prismlm.json"),
    ("explain model ' ' --chat", "the question is empty"),
    (f"{EXPLAIN} --system 'Be brief.'", "--system is a system prompt"),
    (f"{EXPLAIN} --tokens one", "--tokens one.*A:B"),
    (f"{EXPLAIN} --tokens 900:", "predictions"),
    (f"{EXPLAIN} --parts 2", "add --parquet"),
    (f"{EXPLAIN} --parts 2 --parquet new.parquet --by source --json", "out --by and --json"),
    (f"{EXPLAIN} --controller none.safetensors", "No such file"),
    (f"{EXPLAIN} {OTHER}", "was made for the prototype head 01234567"),
    (f"{GENERATE} {OTHER}", "was made for the prototype head 01234567"),
    (f"{GENERATE} --chat", "has no chat template"),
    (f"{GENERATE} --tokens 100000", "generate at most 509"),
    ("generate model ''", "empty"),
    ("generate nowhere text", "not a directory"),
    # Edits and controllers.
    (STEER, "--category and --controller, got none"),
    (f"{STEER} --prototype 7 --edit scale", "give --strength"),
    (f"{STEER} --prototype 192 --strength 0.5", "no prototype 192: expected 0 to 191"),
    (f"{STEER} --prototype 7 --strength 1.5", "fraction of Clamp is 1.5"),
    (f"{STEER} --prototype 7 --strength 1 --edit ablate", "--strength is for"),
    (f"{STEER} --prototype 7 --category Law", "--prototype and --category"),
    (f"{STEER} --category Law --strength -0.5", "no categories yet"),
    (f"{STEER} --category Law --strength 1 --edit scale", "is for --prototype"),
    (f"{STEER} --only residual --prototype 7 --strength 0.3", "leaves no prototypes"),
    (f"{STEER} {OTHER}", "was made for the prototype head 01234567"),
    (f"{STEER} {OTHER} --prototype 7", "got --prototype and --controller"),
    (f"{STEER} {OTHER} --strength 1", "--strength is for"),
    ("steer model --prototype 7 --strength 0.3", "got neither"),
    ("steer model --prototype 7 --file a.txt --generate 5", "leave out --generate"),
    ("calibrate model --task none.jsonl --out new.safetensors", "No such file"),
    (f"{SUPPRESS} --examples few.txt", "there are 2 examples"),
    (f"{SUPPRESS} --keep few.txt", "2 texts to keep"),
    (f"{SUPPRESS} --target 2", "the target is 2"),
    (f"{SUPPRESS} --tasks piqa", "leave out --tasks"),
    (f"{SUPPRESS} --questions 2 --tasks piqa --data .", "piqa is not a directory"),
    (WHAT_IF, "--without"),
    (f"{WHAT_IF} --without license=none", "no text of this lens has license=none"),
    (f"{WHAT_IF} --without gone --generate 3", "has no document 'gone'"),
    # Corpora and lenses.
    (f"{BUILD} --id-column nope", "'nope'"),
    (f"{BUILD} --tokenizer .", "No tokenizer could be loaded"),
    (f"{BUILD} --heldout 2", "below 1"),
    (f"{BUILD} --dataset x", "got both"),
    (f"{BUILD} --data-files x --split test", "leave out --data-files and --split"),
    (f"{BUILD} --shard 1/2 --workers 2", "use one of them"),
    (f"{BUILD} --language en,xq", "unknown language xq"),
    ("corpus build bad.jsonl --out new", "bad.jsonl:2 is not valid JSON"),
    ("corpus build texts.jsonl --out corpus", "--overwrite"),
    ("corpus info cut", "tokens-00000.bin has 0 bytes"),
    (f"{INDEX} --window 4000", "4000.*reads 512"),
    (f"{INDEX} --positions 0", "--positions is 0.*above 0 and up to 1"),
    (f"{INDEX} --codes int4", "--codes is 'int4'.*'int8' or 'pq'"),
    (f"{INDEX} --device cpuu", "the device 'cpuu' cannot be used.*expected cpu"),
    (f"{INDEX} --shard 3/2", "--shard 3/2.*I/N"),
    (f"{INDEX} --parts 1 --workers 2", "more parts"),
    (f"{INDEX} --parts 2 --shard 1/2", "--shard"),
    ("index model --corpus .", "is not a corpus"),
    ("label none --endpoint http://host/v1", "go together"),
    ("label none --prototypes 3", "goes with --endpoint"),
    ("attach no/such-model --corpus corpus --out new", "nor a model that can be downloaded"),
    (f"{ATTACH} --prototypes 10 --prototypes-per-token 11", "at most the number of proto"),
    (f"{ATTACH} --positions 2", "--positions is 2"),
    # Studies.
    (f"{SUITE} --tasks piqaa", "task of the suite 'seed' is 'piqaa'.*Did you mean 'piqa'"),
    (f"{SUITE} --tasks boolq", "super_glue is not a directory.*--tasks"),
    ("eval nowhere", "is not a directory"),
    (f"{GLUE} --tasks sst", "is 'sst': expected 'cola'.*Did you mean 'sst2'"),
    (f"{GLUE} --seeds 0,x", "--seeds is '0,x'.*such as 0,1,2"),
    (f"{GLUE} --search --warmup 0", "--search chooses.*leave out --warmup"),
    ("eval judge --prompts f", "name a MODEL, or a judge to examine and its --out"),
    ("eval judge m --prompts few.txt", "there is no model directory m"),
    ("eval judge m", "--corpus DIR or --prompts FILE, one of them"),
    (f"{JUDGE} {ENDPOINT}", "go together"),
    (f"{JUDGE} {ENDPOINT} --endpoint-model m --judge j", "are two judges: give one"),
    ("eval clamping studied/mamba --pairs studied/pairs.parquet", "no attention heads"),
    # What parts of a model do.
    ("inspect attention fed", "a text or --roles, got neither"),
    ("inspect attention fed Text --group nose", "'nose': expected 'attention'"),
    ("inspect attention fed Text --cases x", "leave out --cases"),
    ("inspect attention fed --roles --out maps.png", "leave out --out"),
    ("inspect channels studied/llama --corpus studied/corpus --html new.html", "no channels"),
    (f"{EFFECT} --cases boxes.jsonl", "expected either channels"),
    (f"{EFFECT} --cases boxes.jsonl --find", "go together"),
    (f"{EFFECT} --cases boxes.jsonl --channel 1:9", "no channel 9 in layer 1"),
    (f"{EFFECT} --cases boxes.jsonl --channel 1", "expected LAYER:CHANNEL"),
    ("inspect heads studied/gpt2 --corpus studied/corpus", "window of 256 tokens.*64 positions"),
    ("inspect themes studied/llama --of heads --lens sample", "leave out --lens"),
    ("inspect themes studied/llama --corpus c --layer 0", "leave out --corpus and --layer"),
    (f"{FEEDBACK} fed texts.jsonl --corpus c", "leave out --corpus"),
    (f"{FEEDBACK} fed texts.jsonl --tokens 8 --check prob", "Did you mean 'probe'"),
    (f"{FEEDBACK} studied/gpt2 --corpus corpus", "uncertainty_feedback: {enabled: true"),
    ("inspect prototypes model 192", "expected"),
    ("inspect prototypes model 1 --search law", "leave out --search"),
    ("inspect prototypes model --category Law", "no category 'Law'.*prismlm label"),
    # Addresses.
    ("serve bare --port 0", "has no lens"),
    ("explore none --host ''", "--host is empty"),
    ("explore none --host 8.8.8.8", "an address of this machine"),
    # No output replaces what is there or is read, and it has the ending of what it is.
    ("audit none texts.jsonl --jsonl rows.jsonl", "rows.jsonl exists.*with --overwrite"),
    ("audit none texts.jsonl --jsonl other.txt", "other.txt: expected.*ends with .jsonl"),
    ("audit none rows.jsonl --jsonl rows.jsonl --overwrite", "is read by this command"),
    ("audit none rows.jsonl --jsonl link.jsonl --overwrite", "is read by this command"),
    (f"{CALIBRATE} c.safetensors", "c.safetensors exists.*with --overwrite"),
    (f"{CALIBRATE} other.txt", "other.txt: expected.*ends with .safetensors"),
    ("calibrate none --task rows.jsonl --out link.jsonl --overwrite", "is read by this command"),
    ("corpus build sample --out rows.jsonl", "rows.jsonl"),
    ("attach model --corpus corpus --out rows.jsonl", "rows.jsonl"),
    ("eval glue none --out rows.jsonl", "rows.jsonl"),
    ("demo --quick --no-serve --out rows.jsonl", "rows.jsonl"),
    ("attach model --corpus corpus --out model", "model"),
    ("index model --corpus corpus --overwrite --lens ./corpus", "corpus"),
    ("eval model --out model", "model"),
]


@pytest.fixture(scope="module")
def place(tiny_model, tiny_corpus, studied, tmp_path_factory):
    """The directory that the commands run in."""
    place = tmp_path_factory.mktemp("place") / "place"
    shutil.copytree(tiny_model, place / "model")
    shutil.copytree(tiny_model, place / "bare", ignore=lambda *_: ["lens"])
    chatting(tiny_model, place / "chat")
    (shutil.copytree(tiny_model, place / "nested") / "config.json").write_text(NESTED)
    tokenizer = shutil.copytree(tiny_model, place / "odd") / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | NO_LENGTH))
    shutil.copytree(tiny_corpus, place / "corpus")
    shutil.copytree(tiny_corpus, place / "cut")
    (place / "cut" / "tokens-00000.bin").write_bytes(b"")
    (place / "studied").symlink_to(studied)
    save_glue_model(place / "words")
    write_toy(place / "glue", rows=8)
    write_benchmarks(place / "data", "piqa")
    for name, text in FILES.items():
        (place / name).write_text(text)
    (place / "latin.txt").write_bytes("déjà".encode("latin-1"))
    (place / "cut.parquet").write_bytes(b"PAR1 and no more")
    (place / "link.jsonl").symlink_to("rows.jsonl")
    prismlm.Controller(((0, 0.5),), "0123456789").save(place / "other.safetensors")
    corpus = Corpus.open(place / "corpus")
    fed, feedback = make_fed_gpt2(len(corpus.tokenizer))
    save_uncertainty(save_model(fed, corpus, place / "fed"), feedback)
    return place


@pytest.mark.parametrize(("command", "words"), REFUSED)
def test_bad_input_is_refused_and_nothing_is_written(refused, place, command, words):
    def files():
        return {path: path.is_file() and path.stat().st_mtime_ns for path in place.rglob("*")}

    before = files()
    assert re.search(words, refused(*shlex.split(command), cwd=place), re.DOTALL)
    assert files() == before


def commands(command=None, name=()):
    command = typer.main.get_command(app) if command is None else command
    for part, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*name, part))
    if not hasattr(command, "commands"):
        yield " ".join(name), command


def out_of_bounds(option):
    """Yield values that are below or above what an option takes, or no numbers."""
    if (least := getattr(option, "min", None)) is not None:
        yield least - 1
    if (most := getattr(option, "max", None)) is not None:
        yield most + 1
    if "float" in str(option.type_descriptor.annotation):
        yield "nan"


def test_a_value_that_is_out_of_bounds_names_its_option(capsys):
    run, count = typer.main.get_command(app), 0
    for name, command in commands():
        for option in command.params:
            for value in out_of_bounds(option):
                with pytest.raises(SystemExit, match="2"):
                    run([*name.split(), option.opts[0], str(value)])
                assert option.opts[0] in capsys.readouterr().err, name
                count += 1
    assert count > 90


@pytest.mark.skipif(not Path(FULL).is_char_device(), reason="needs a device that is always full")
def test_an_output_that_is_full(tiny_corpus):
    full = f"import os; os.dup2(os.open('{FULL}', os.O_WRONLY), 1)\n"
    done = forked.run("corpus", "info", tiny_corpus, code=full + forked.COMMAND)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be used: No space left on device.\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "model", "The"),
        ("train", "recipe.yaml", "--search"),
        ("index", "model", "--corpus", "corpus", "--dry-run"),
    ],
    ids=" ".join,
)
def test_commands_of_one_process_are_refused_in_several(arguments):
    for rank in "01":
        done = forked.run(*arguments, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        assert (done.returncode, done.stdout) == (2, "")
        # Only the first process prints.
        assert ("without torchrun" in done.stderr) == (rank == "0")
        assert f"prismlm {arguments[0]}" in done.stderr or rank == "1"


def test_processes_that_accelerate_does_not_connect_are_refused():
    unconnected = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}
    done = forked.run("train", "recipe.yaml", **unconnected)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m prismlm train" in done.stderr
    # One process of accelerate or torchrun does the work.
    for alone in ({"ACCELERATE_MIXED_PRECISION": "no"}, {"WORLD_SIZE": "1", "MASTER_PORT": "1"}):
        assert "recipe.yaml" in forked.run("train", "recipe.yaml", **alone).stderr
