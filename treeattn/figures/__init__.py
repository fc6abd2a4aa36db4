"""Every figure that the notebooks and the README show, drawn by code.

One module a notebook; each public function draws one figure and returns it.
`python -m treeattn.figures figures` writes them all into a folder.
"""

from treeattn.extras import need

need("figures", "matplotlib", "PIL", "tqdm")
