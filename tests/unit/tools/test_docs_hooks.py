"""Links between pages are those of the site."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocs", reason="the extra 'docs' brings it")

from tools.docs_hooks import with_links


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("index.md", "[tour](tour.md)", "[tour](tour.md)"),
        ("planners.md", "[README](../README.md#strategies)", "[README](readme_page.md#strategies)"),
        ("readme_page.md", "see [torch](docs/torch.md)", "see [torch](torch.md)"),
        ("reference/torch.md", "[guide](../torch.md)", "[guide](../torch.md)"),
        ("torch.md", "[titan](../scripts/examples/titan.md)", "[titan](titan.md)"),
        ("titan.md", "[code](titan_balanced.py)", "code"),
        ("readme_page.md", "[license](LICENSE)", "license"),
        ("readme_page.md", "![plot](out/plot.svg)", ""),
        ("tour.md", "[site](https://pytorch.org)", "[site](https://pytorch.org)"),
        ("tour.md", "[below](#more)", "[below](#more)"),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_is_text(page: str, link: str, wanted: str) -> None:
    assert with_links(link, page) == wanted
