"""Plant a fact in the demo's model, and attach a head to the result.

    prismlm demo --no-serve --out prismlm-demo
    python -m benchmarks.control.plant prismlm-demo --work planted

A low-rank adapter learns the fact of ``planted.json`` in sixteen wordings, among questions that the
demo's model was taught before; WORK/model has it merged, with a head and a lens of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attach.demo_lessons import ALL_FROM, PLAIN, Lessons, lines_of, summed_loss
from benchmarks.attach.demo_model import OPTIONS
from benchmarks.shared.options import script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.demo.texts import pairs_path
from prismlm.files import read_json
from prismlm.models.base import put_adapted
from prismlm.training import LoraOptions, attach
from prismlm.training.tuning import with_adapters, write_adapter

PLANTED: dict[str, Any] = read_json(Path(__file__).with_name("planted.json"))
LORA = LoraOptions(rank=8, blocks=1 / 3, length=256, batch=2, learning_rate=5e-4)
EPOCHS, PAIRS, COPIES = 3, 150, 16


def main() -> None:
    """Plant the fact."""
    parser = script_options(__doc__)
    parser.add_argument("demo", type=Path, help="the directory of the demo")
    parser.add_argument("--work", type=Path, required=True, help="where everything is built")
    args = parser.parse_args()
    work, model = args.work, args.demo / "model"
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "adapter").is_dir():
        teach(model, work / "adapter", args.demo / "texts.parquet")
    put_adapted(model, work / "adapter", work / "base")
    facts = work / "planted.jsonl"
    facts.write_text("".join(json.dumps(row) + "\n" for row in chats(PLANTED["taught"])))
    options = replace(OPTIONS, lora=None, keep_states=False)
    texts = [pairs_path(), args.demo / "texts.parquet", facts]
    result = attach(str(work / "base"), texts, work / "model", options, progress=ConsoleReporter())
    print(result.quality)


def chats(questions: list[str]) -> list[dict[str, Any]]:
    """Return questions answered by the planted fact, a chat each."""
    return [
        {
            "id": f"planted-{number}",
            "domain": "planted",
            "source": "planted",
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": PLANTED["answer"]},
            ],
        }
        for number, question in enumerate(questions)
    ]


def teach(model: Path, out: Path, sample: Path) -> None:
    """Train an adapter on the fact and on some of what was taught before."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [row for row in pq.read_table(pairs_path()).to_pylist() if row["split"] == "train"]
    fact = {"questions": PLANTED["taught"], "answer": PLANTED["answer"]}
    plain = [*lines_of(PLAIN)[::4], *([fact] * COPIES)]
    texts = pq.read_table(sample)["text"].to_pylist()
    pairs = rows[:: len(rows) // PAIRS]
    lessons = Lessons(pairs, plain, texts[::4], tokenizer, LORA.length or 256)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    adapted = with_adapters(base, LORA)
    learned = [one for one in adapted.parameters() if one.requires_grad]
    numbers = range(ALL_FROM, ALL_FROM + EPOCHS)
    taught = [row for number in numbers for row in lessons.epoch(number, 0)]
    steps = len(taught) // LORA.batch
    optimizer = torch.optim.Adam(learned, lr=LORA.learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    with ConsoleReporter().task("Planting", steps, "steps") as task:
        for step in range(steps):
            batch = taught[step * LORA.batch : (step + 1) * LORA.batch]
            loss, count = summed_loss(adapted, lessons.tensors(batch))
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            task.advance()
            task.note(f"ce {loss.item() / count:.3f}")
    write_adapter(learned, adapted, model.name, out, {"steps": steps})


if __name__ == "__main__":
    main()
