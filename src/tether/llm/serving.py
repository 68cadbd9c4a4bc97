"""A vLLM server for one run: started with it, watched while it comes up, ended with it in whatever way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tether.errors import ConfigError, EngineError

LOG_FILE = "vllm.log"
"""In the run's folder: what the server printed."""

#: Seconds a server has to come up, and between two words about it.
_START, _WORD_EVERY = 1800.0, 10.0
#: GiB that vLLM on a CPU keeps for keys and values, unless VLLM_CPU_KVCACHE_SPACE says otherwise.
CPU_CACHE_GIB = 1


@dataclass(frozen=True)
class Server:
    """How a server is started."""

    command: Sequence[str]
    """Without a shell."""
    url: str
    """Where it will answer."""
    log: Path
    """What it prints goes there, after what there is."""
    environment: Mapping[str, str]
    """Besides this process's own."""


def vllm_server(
    folder: Path, *, name: str, port: int, log: Path, on_cpu: bool, options: Mapping[str, object]
) -> Server:
    """How to serve a model's folder so that training can use it.

    Args:
        folder: of the model; weights are reloaded from it.
        name: what requests call the model.
        port: on this machine alone.
        log: file for what it prints.
        on_cpu: it runs on the CPU; compiling for minutes is then left out.
        options: further ones of ``vllm serve``; None is left out.

    >>> plan = vllm_server(Path("m"), name="m", port=8000, log=Path("vllm.log"), on_cpu=True,
    ...                    options={"dtype": "float32", "seed": None})
    >>> plan.url, plan.command[-4:]
    ('http://127.0.0.1:8000', ['--block-size', '32', '--dtype', 'float32'])
    """
    command = [
        # Not `vllm serve`, which in the distribution for CPUs looks for one of another name (0.28).
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", name),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        # TRL seeds each request, and vLLM (0.28) dies of a seed when a CPU reads a prompt in two parts.
        # A CPU's blocks have 128 tokens otherwise: of a shorter prompt nothing would be remembered.
        *(["--enforce-eager", "--no-enable-chunked-prefill", "--block-size", "32"] if on_cpu else []),
    ]
    for option, value in options.items():
        command += [] if value is None else [f"--{option}", str(value)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    if on_cpu:
        environment["TORCH_COMPILE_DISABLE"] = "1"
        environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(CPU_CACHE_GIB))
        # Left to itself each server binds its threads to the first cores, all servers to the same ones.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return Server(command, f"http://127.0.0.1:{port}", log, environment)


def free_port() -> int:
    """A port nobody listens on now.

    >>> free_port() > 1023
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(port: int) -> None:
    """Refuse a port that is taken.

    Raises:
        ConfigError: it is in use, or may not be used.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that a server has just left
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"vllm_port={port} cannot be used ({error.strerror}). Leave it out, and a free one is "
                f"taken, or give a running server's address: vllm_server=http://localhost:{port}."
            ) from error


@contextmanager
def serving(server: Server, say: Callable[[str], None]) -> Iterator[None]:
    """Have it answer inside the block, and be gone after it, with all that it started.

    It also ends when this process does, killed or not.

    Args:
        server: how to start it.
        say: called with a line now and then while it starts; and, from another thread, if it ends inside the
            block: who waits for its answers notices that, but nobody waits while the trainer evaluates.

    Raises:
        EngineError: it ended, or did not answer in half an hour; with the last line of its log.
    """
    server.log.parent.mkdir(parents=True, exist_ok=True)
    with server.log.open("ab") as log:
        process = _start(server, log)
        try:
            _wait_until_it_answers(server, process, say)
            threading.Thread(target=_tell_of_its_end, args=(server, process, say), daemon=True).start()
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _tell_of_its_end(server: Server, process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    process.wait()
    assert process.stdin is not None
    if not process.stdin.closed:  # nobody has asked it to
        say(f"vLLM has ended (exit code {process.returncode}). {_last_line(server.log)}")


def _start(server: Server, log: IO[bytes]) -> subprocess.Popen[bytes]:
    child = Path(__file__).with_name("serve_child.py")
    return subprocess.Popen(
        [sys.executable, str(child), *server.command], stdin=subprocess.PIPE, stdout=log,
        stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **server.environment},
    )  # fmt: skip


def _wait_until_it_answers(
    server: Server, process: subprocess.Popen[bytes], say: Callable[[str], None]
) -> None:
    began = spoke = time.monotonic()
    say(f"Starting vLLM at {server.url}; its log: {server.log}")
    while not _answers(server.url):
        now = time.monotonic()
        if process.poll() is not None:
            raise EngineError(
                f"vLLM ended while it started (exit code {process.returncode}). {_last_line(server.log)}"
            )
        if now - began > _START:
            raise EngineError(
                f"vLLM did not answer at {server.url} within {_START:g} s. {_last_line(server.log)}"
            )
        if now - spoke > _WORD_EVERY:
            spoke = now
            say(f"vLLM is starting, {now - began:.0f} s so far ...")
        time.sleep(0.5)
    say(f"vLLM answers, after {time.monotonic() - began:.0f} s.")


def _answers(url: str) -> bool:
    from tether.integrations.vllm_server import VLLMServer

    try:
        VLLMServer(url, silence=5.0).wait(0.0)
    except EngineError:
        return False
    return True


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"Its last line: {lines[-1].strip() if lines else ''!r} (all of it: {log})."
