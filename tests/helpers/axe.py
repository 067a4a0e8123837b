"""What axe, a checker of accessibility, finds on a page."""


def problems(page, *rules):
    """Return what it objects to, as lines, by all rules or the named ones."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": {"type": "rule", "values": rules}} if rules else None
    found = Axe().run(page, options=options).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]
