"""Every figure that the notebooks and the README show, drawn by code.

A module a notebook, or more; each public function draws one figure and returns it.
`python -m figures figures` writes them all into a folder. They belong to a checkout, as the
notebooks do: no wheel has them.
"""

import importlib.util

missing = [name for name in ("matplotlib", "PIL", "tqdm") if not importlib.util.find_spec(name)]
if missing:
    raise ImportError(f"figures needs {', '.join(missing)}: pip install -r requirements.txt")
