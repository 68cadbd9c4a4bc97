"""`make bench`: what the trust region costs, as ratios against the clip and against other people's code.

    python -m benchmarks.bench [--quick] [--only NAME ...] [--output FOLDER]

Start with `bars.py`, the table of what is promised. `contestants.py` holds the paths that compete, on
the workloads of `workload.py`; `timing.py` runs them in turns.
"""
