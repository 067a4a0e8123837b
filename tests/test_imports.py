"""Arrows of imports point one way, late ones and the packages that are run on the way counted."""

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

SOURCE = Path(__file__).parents[1] / "src" / "prismlm"


def packages_run_for(imported, importer):
    """Return the packages whose ``__init__`` runs before a module, but for the importer's own."""
    parts = imported.split(".")
    above = (".".join(parts[:n]) for n in range(1, len(parts)))
    return {name for name in above if importer != name and not importer.startswith(f"{name}.")}


def test_no_module_is_imported_in_a_circle():
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
