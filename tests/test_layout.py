"""The tests stand where what they test stands."""

from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "prismlm"
# What several tests share, the pages of docs/ and the scripts of benchmarks/.
OTHERS = ("helpers", "docs", "benchmarks")


def test_every_folder_and_file_has_its_counterpart():
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS)
        if folder.parts and folder.parts[0] in OTHERS:
            continue
        assert (SOURCE / folder).is_dir(), f"prismlm has no {folder}, which {path.name} is in"
        if folder.parts:
            # test_run_failures.py is of run.py.
            words = path.stem.split("_")[1:]
            named = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
            there = {module.stem for module in (SOURCE / folder).iterdir()}
            assert there & set(named), f"{folder} has no module that {path.name} is named after"
