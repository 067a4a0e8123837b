"""What axe, a checker of accessibility, finds on a page."""


def problems(page):
    """Return what it objects to, as lines."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]
