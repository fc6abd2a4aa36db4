"""Tree and ring decoding on a small cluster inside one Linux machine: processes, sockets, links.

`python -m labs.cluster` runs one experiment. In the order of reading: `network` (namespaces and
links), `switch` (the delay between nodes), `rank` (one process), `cluster` (all processes and their
measurements), `measure` (the stored results), `drawing` (the notebook's figures).
"""
