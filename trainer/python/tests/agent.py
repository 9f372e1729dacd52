"""The agent's end of the socket, for tests: it starts a command and says what the test wants said."""

import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time


class Agent:
    def __init__(self, command, raw=False, **environment):
        """raw leaves it to the test to read the socket."""
        self.dir = tempfile.TemporaryDirectory()
        path = os.path.join(self.dir.name, "agent.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)
        listener.settimeout(60)
        self.errors = open(os.path.join(self.dir.name, "stderr"), "w+b")
        self.process = subprocess.Popen(command, env={**os.environ, **environment, "CAPSTAN_SOCKET": path}, stderr=self.errors)
        self.socket, _ = listener.accept()
        listener.close()
        self.ids, self.steps, self.answers = 0, [], queue.Queue()
        if not raw:
            threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        try:
            with self.socket.makefile("rb") as lines:
                for line in lines:
                    a = json.loads(line)
                    (self.answers.put if a.get("id") else self.steps.append)(a)
        except (OSError, ValueError):
            pass
        self.answers.put(None)

    def tell(self, do, **fields):
        self.ids += 1
        self.socket.sendall(json.dumps({"id": self.ids, "do": do, **fields}).encode() + b"\n")
        return self.ids

    def answer(self, id, timeout=20):
        """The answer to a command, without its id. What is left of older commands is passed over, as the agent does."""
        while True:
            a = self.answers.get(timeout=timeout)
            if a is None:
                raise EOFError(f"the command has gone: {self.stderr()}")
            if a.pop("id") == id:
                return a

    def ask(self, do, timeout=20, **fields):
        return self.answer(self.tell(do, **fields), timeout)

    def until(self, step, timeout=20):
        """Waits until the command has told of a step."""
        deadline = time.monotonic() + timeout
        while not self.steps or self.steps[-1]["step"] < step:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"step {step} was not done: {self.steps[-3:]} {self.stderr()}")
            time.sleep(0.002)

    def stderr(self):
        with open(self.errors.name) as f:
            return f.read()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.errors.close()
        self.dir.cleanup()


def free_port():
    """A port that is free, and whose state port is free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as s:
            port = s.getsockname()[1]
        if port + 512 < 65536:
            try:
                socket.create_server(("", port + 512)).close()
                return port
            except OSError:
                pass


class Ring:
    """Generations of some agents, formed as capstan-agent forms them."""

    def __init__(self):
        self.count, self.port = 0, 0

    def start(self, members, step, source=None, behind=(), host="127.0.0.1"):
        """Says enter to all at once, and returns the ids; the source may be an agent outside the members."""
        self.count += 1
        port = self.port = free_port()
        by = lambda a: {"rank": members.index(a) if a in members else -1, "ordinal": a.ordinal, "host": host}
        ids = {}
        for a in members + [source] * (source is not None and source not in members):
            command = {"step": step, "generation": f"1.{self.count}", "rank": by(a)["rank"],
                       "environment": {"MASTER_ADDR": host, "MASTER_PORT": str(port)}}
            if a in members:
                command |= {"world": len(members), "members": [by(m) for m in members]}
            if a in behind:
                command["from"] = by(source)
            if a is source and behind:
                command["to"] = [by(b) for b in behind]
            ids[a] = a.tell("enter", **command)
        return ids

    def form(self, members, step, source=None, behind=()):
        """Has all enter, sees that they have one state, and lets them run. It returns the ids of run."""
        ids = self.start(members, step, source, behind)
        answers = {a: a.answer(id) for a, id in ids.items()}
        hashes = {answers[a]["hash"] for a in members}
        if len(hashes) != 1:
            raise AssertionError(f"they entered with {answers}")
        for a in members:
            a.steps.clear()
        return {a: a.tell("run", step=step) for a in members}
