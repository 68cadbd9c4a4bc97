"""A script started twice, as the two processes of a group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn


def run_two_ranks(
    script: Path,
    *arguments: object,
    output: Path,
    timeout: float,
    cwd: Path | None = None,
    **environment: str,
) -> None:
    """Run a script as ranks 0 and 1 and wait for both; their words are kept as OUTPUT/log-RANK.

    Ranks and where they meet are in the environment, with whatever else is given.
    One that fails ends the other, which would wait for it, and fails the test with both their last words.
    """
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    common = {**rank_environment(), **meeting}
    command = [sys.executable, str(script), *map(str, arguments)]
    logs = [(output / f"log-{rank}").open("w") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = _wait(ranks, timeout)
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            rank.wait()
            log.close()
    tails = "\n".join((output / f"log-{rank}").read_text()[-3000:] for rank in range(2))
    assert codes == [0, 0], f"exit codes {codes} (None: after {timeout} s, or the other's failure)\n{tails}"


def rank_environment() -> dict[str, str]:
    """One thread, the modules beside this one, and the stacks of a rank that dies in native code."""
    beside = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": beside, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}


def end_rank() -> NoReturn:
    """The last line of a rank's script: wait for the other and leave, without Python's own taking down.

    Gloo's threads outlive their group, and one that lets go of a tensor while the interpreter is taken down
    aborts the process now and then: "terminate called without an active exception" (pytorch#179291, #190489).
    """
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Exit codes, once both are through, one has failed or the time is over."""
    end = time.monotonic() + timeout
    codes = [rank.poll() for rank in ranks]
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
    return codes
