"""A ``python`` that begins with torch imported: importing it takes seconds, and each run does.

`Interpreter` starts one process, which forks for every program, and writes an executable named
``python`` that asks it to. A program has the arguments, folder, environment and outputs that the
executable was started with, and ends when that is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENT = """#!{python} -S
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [1, 2])
server.sendall(request)
sys.exit(int(server.recv(16) or b"70"))
"""


class Interpreter:
    """An executable that is used as Python's is."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fork")  # a socket's path must be short
        self.path = Path(self.folder.name) / "python"
        address = str(Path(self.folder.name) / "socket")
        self.path.write_text(CLIENT.format(python=sys.executable, address=address))
        self.path.chmod(0o755)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, address]
        self.server = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "ready\n"

    def run(self, *tokens: object) -> str:
        """Run a program to its end; returns its output."""
        command = [str(self.path), *map(str, tokens)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def close(self) -> None:
        self.server.kill()
        self.server.communicate()
        self.folder.cleanup()


def serve(address: str) -> None:
    import gc

    import torch
    import torch._dynamo  # which every optimizer loads

    import powergrad.run  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        client, _ = listening.accept()
        if os.fork():
            client.close()
            continue
        listening.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        size, outputs, _, _ = socket.recv_fds(client, 8, 2)
        request = b""
        while len(request) < int.from_bytes(size, "big"):
            request += client.recv(1 << 20)
        child = os.fork()
        if child == 0:
            client.close()
            tokens, folder, environment = json.loads(request)
            execute(tokens, folder, environment, outputs)
        code = None
        while code is None:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
            elif select.select([client], [], [], 0.02)[0]:  # its end: it was killed
                os.kill(child, signal.SIGKILL)
                os._exit(0)
        client.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)


def execute(
    tokens: list[str], folder: str, environment: dict[str, str], outputs: list[int]
) -> None:
    """Do what ``python TOKENS`` does."""
    import runpy

    import powergrad_cli

    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if tokens[:2] == ["-m", "powergrad"]:
        sys.argv = ["powergrad", *tokens[2:]]
        sys.exit(powergrad_cli.main())
    sys.argv = tokens
    sys.path[0] = os.path.dirname(os.path.abspath(tokens[0]))
    runpy.run_path(tokens[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])
