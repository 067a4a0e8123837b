"""The tree: tests stand where what they test stands, and imports point one way."""

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

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


def packages_run_for(imported, importer):
    """Return the packages whose ``__init__`` runs before a module, but for the importer's own."""
    parts = imported.split(".")
    above = (".".join(parts[:n]) for n in range(1, len(parts)))
    return {name for name in above if importer != name and not importer.startswith(f"{name}.")}


def test_no_module_is_imported_in_a_circle():
    """Late imports, and the packages that are run on the way, count too."""
    graph = grimp.build_graph("prismlm", exclude_type_checking_imports=True, cache_dir=None)
    imports = {
        module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }
    for module, imported in imports.items():
        for name in list(imported):
            imported |= packages_run_for(name, module)
    # Every module is looked at.
    assert len(imports) == len(list(SOURCE.rglob("*.py")))
    TopologicalSorter(imports).prepare()
