"""Sphinx, for the tree of sources that build.py lays out: nothing is run, nothing is fetched."""

import contextlib

from docstrings import as_restructured_text, skip_field

with contextlib.redirect_stdout(None):  # it says that matplotlib is missing: for cards of its own
    import sphinxext.opengraph  # noqa: F401

project = "treeattn"
copyright = "the treeattn authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinxext.opengraph"]
root_doc = "contents"  # index.html is a page of its own
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["treeattn", "checks", "tests", "examples", "figures", "site"]
exclude_patterns += ["conformance/treeattn_conformance"]

nb_execution_mode = "off"  # the stored outputs are tested against fresh ones elsewhere
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

# The API's page. Shapes and types stand in the docstrings.
autodoc_typehints = "none"
autodoc_preserve_defaults = True  # an object's default as its source has it
highlight_language = "text"  # blocks that a page does not call Python are not coloured
default_role = "py:obj"  # `merge` is a link, wherever that name has an entry

# MathJax 2, as jupyter-server-mathjax carries it; build.py copies it.
mathjax_path = "mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full"
mathjax2_config = {
    "tex2jax": {
        "inlineMath": [["\\(", "\\)"]],
        "displayMath": [["\\[", "\\]"]],
        "processEscapes": False,
        "processClass": "math",
        "ignoreClass": "document",
    },
    "HTML-CSS": {  # the one font that the package has
        "availableFonts": [],
        "preferredFont": None,
        "webFont": "STIX-Web",
        "imageFont": None,
        "linebreaks": {"automatic": True, "width": "container"},
    },
    # The MathML that screen readers get would ask for fonts that the package lacks.
    "NativeMML": {
        "styles": {
            f'[mathvariant="{x}"]': {"font-family": "inherit"}
            for x in ("double-struck", "script", "fraktur", "bold-script", "bold-fraktur")
        }
    },
    "TeX": {"equationNumbers": {"autoNumber": "none"}},
    "showMathMenu": False,
    "messageStyle": "none",
}

html_theme = "furo"  # light, dark, or as the reader's system is
html_title = "treeattn"
html_favicon = "static/favicon.svg"
ogp_site_name = "treeattn"
ogp_image = "_static/card.png"
ogp_image_alt = "A row of devices: above, small states hop along a tree; below, shards of keys."
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}


def setup(app) -> None:
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-skip-member", skip_field)
