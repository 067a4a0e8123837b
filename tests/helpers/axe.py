"""What axe, a checker of accessibility, finds on a page."""


def problems(page, *rules):
    """Return what it objects to, as lines, by all rules or the named ones."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": {"type": "rule", "values": rules}} if rules else None
    found = Axe().run(page, options=options).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]


def assert_accessible(page):
    """It objects to nothing, and the page has enough contrast in the dark too."""
    # The other rules look at no colour.
    for scheme, rules in (("dark", ["color-contrast"]), ("light", [])):
        page.emulate_media(color_scheme=scheme)
        assert problems(page, *rules) == []
