"""The process that runs math-verify for `tether.llm.tasks.math_answers`; started by path, not imported.

It reads one JSON list ``[response, answer]`` a line and writes one JSON boolean a line, after a first
line that says it is ready. Its parent keeps the time and ends it when a check takes too long, so
math-verify's own signal-based limits, which work in a main thread alone, stay off.
"""

from __future__ import annotations

import json
import logging
import sys


def main() -> None:
    """Answer checks until standard input ends."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answer_stream = sys.stdout
    sys.stdout = sys.stderr  # nothing a library writes may mix with the answers
    answer_stream.write("true\n")
    answer_stream.flush()
    for line in sys.stdin:
        response, answer = json.loads(line)
        found = parse(response, parsing_timeout=None)
        correct = verify(parse(f"\\boxed{{{answer}}}", parsing_timeout=None), found, timeout_seconds=None)
        answer_stream.write(json.dumps(bool(correct)) + "\n")
        answer_stream.flush()


if __name__ == "__main__":
    main()
