"""What a step costs from 8 to 1024 GPUs: bytes, arithmetic and traffic, from formulas.

    python -m benchmarks.scaling            # prints the tables of docs/scaling.md
    python -m benchmarks.scaling --write    # puts them into the page

Every number of the page's tables is made here. `formulas.py` has the formulas; `two_processes.py` runs the
same passes on two processes and counts what their collectives move, with which the formulas must agree.
"""
