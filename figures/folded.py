"""What a reader should guess first: an output that opens with a click, in every viewer."""

import base64
import html
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.display import HTML, display
from IPython.utils.capture import capture_output


@contextmanager
def folded(summary: str = "Open this when you have a guess") -> Iterator[None]:
    """Fold what the block prints and displays behind one line.

    JupyterLab, VS Code, plain nbconvert and code hosts fold the element `details`; only some of
    them fold an output that a notebook's metadata calls hidden.
    """
    with capture_output(stderr=False) as captured:
        yield
    shown = f"<pre>{html.escape(captured.stdout.rstrip())}</pre>" if captured.stdout else ""
    for output in captured.outputs:
        shown += as_html(output.data, output.metadata) or (
            f"<pre>{html.escape(output.data['text/plain'])}</pre>"
        )
    display(HTML(f"<details><summary>{summary}</summary>{shown}</details>"))


def as_html(data: dict, metadata: dict | None) -> str:
    """The picture of an output, if it has one, with its alternative text.

    JupyterLab leaves out the text of a picture that is an output itself.
    """
    image = data.get("image/png")
    if image is None:
        return ""
    if isinstance(image, bytes):
        image = base64.b64encode(image).decode()
    alt = html.escape((metadata or {}).get("image/png", {}).get("alt", ""), quote=True)
    return f'<img src="data:image/png;base64,{image}" alt="{alt}">'
