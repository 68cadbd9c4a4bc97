"""`make gpu-check`: all that only a GPU can show, in one command and under half an hour.

    python -m benchmarks.gpu_check [--only PIECE ...] [--output FOLDER] [--model NAME]
    python -m benchmarks.gpu_check --dry-run       # tiny sizes, the same code on a CPU, kernels interpreted

Writes a page and its numbers, named after the GPU. `pieces.py` has the pieces, each a function that returns
figures; `outcome.py` says what a figure is and when its bar is met. `__main__.py` gives each piece a process
of its own: one that fails, hangs or takes the device down with it is reported, and the others go on.
"""
