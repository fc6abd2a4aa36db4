"""notebooks/: python -m course grade NOTEBOOK.ipynb. Above it: python notebooks/course grade …"""

import sys
from pathlib import Path

if not __package__:  # run as a folder: its modules are those of the package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from course.grade import main

main()
