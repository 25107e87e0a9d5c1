"""What the documentation links to is there: files, and headings within them."""

import re

import pytest
from commands import ROOT

PAGES = sorted(
    page.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "configs/*.md", "tests/goldens/*.md", "experiments/**/*.md")
    for page in ROOT.glob(pattern)
)


def anchors(page):
    """The names under which headings can be linked to, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_links_to_is_there(page):
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        linked = ROOT / page.parent / name if name else ROOT / page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            missing.append(target)
    assert missing == []
