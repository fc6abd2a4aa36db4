"""Every figure that the notebooks and the README show, drawn by code.

A module a notebook, or more; each public function draws one figure and returns it.
`python -m figures figures` writes them all into a folder. They belong to a
checkout, as the notebooks do: the wheel has none of them.
"""

from treeattn.extras import CHECKOUT, need

need("figures", "matplotlib", "PIL", "tqdm", install=CHECKOUT)
