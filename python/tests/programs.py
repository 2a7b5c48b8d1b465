"""A llama-server with the drop-in, for the tests beside this file."""

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request

from llama_sidecar import Sidecar, command_path

# How long a program may take to start, in tenths of a second.
PATIENCE = 1200


def free_socket():
    """A path for a control socket, in a new folder."""
    return os.path.join(tempfile.mkdtemp(), "socket")


class LlamaServer:
    """A server that runs until the block ends, which has to go well."""

    def __init__(self, program, model, *options):
        self.socket = free_socket()
        self.sidecar = Sidecar(self.socket)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = tempfile.TemporaryFile("w+")
        run = [command_path(), "run", *options, "--socket", self.socket, "--", program, "-m", model]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--no-webui"]
        size = ["-t", "1", "--parallel", "1", "-c", "256"]
        self.child = subprocess.Popen([*run, *place, *size], stdout=self.log, stderr=self.log)

    def __enter__(self):
        for _ in range(PATIENCE):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                break
            except OSError:
                assert self.child.poll() is None, self._printed()
                time.sleep(0.1)
        return self

    def __exit__(self, kind, *_):
        self.child.terminate()
        status = self.child.wait(60)
        if kind is None:
            assert status == 0, f"the server ended with {status}: {self._printed()}"

    def _printed(self):
        self.log.seek(0)
        return self.log.read()

    def process(self):
        """The number of the server's process."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.socket)
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], "little")

    def ask(self):
        """The probabilities of six tokens."""
        body = {"prompt": "The capital of France is", "n_predict": 6, "temperature": 0}
        body |= {"n_probs": 3, "cache_prompt": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["completion_probabilities"]
