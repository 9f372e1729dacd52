"""Lets a PyTorch script train through changes of its workers, without being started anew.

    for step in capstan.steps({"model": model, "optimizer": optimizer}, total=10000, checkpoint="/checkpoint/job.pt"):
        with step:
            loss(batch(step.index, step.rank, step.world)).backward()
            step.average(model.parameters())
            optimizer.step()

The README beside this file says what is promised, and what goes over the socket to capstan-agent.
"""

import contextlib
import datetime
import hashlib
import io
import json
import os
import queue
import re
import socket
import struct
import threading
import time


MAX_FAILURES = 10  # of one step, after which not the network is to blame but the script


class Interrupted(Exception):
    """The agent wants something else by now, and waits for no answer."""


class Lost(Exception):
    """A connection to another member broke."""


def steps(state, total, checkpoint=None, entered=None, backend=None, verify=True, framework=None):
    """Yields a Step for each step of the job that this worker takes part in; it never returns, for the agent ends the process.

    state       objects with state_dict and load_state_dict, by name: all that must be the same on every worker.
    total       steps of the whole job.
    checkpoint  a file that every worker can read; None: there is none, and a state that all have lost begins from 0.
    entered     is called when a generation's process group is there: make DistributedDataParallel and the like anew in it.
    verify      compare a hash of the state over all workers in each new generation.
    """
    path = os.environ.get("CAPSTAN_SOCKET")
    if not path:
        raise RuntimeError("CAPSTAN_SOCKET is not set: start this with capstan-agent --in-place -- python …")
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(path)
    return Child(agent, framework or Torch(backend), state, total, checkpoint, entered, verify).work()


class Child:
    """The command's end of the socket. One thread reads, so that an abort is heard in the midst of a step; the script's does the rest."""

    def __init__(self, agent, framework, state, total, checkpoint, entered, verify):
        self.agent, self.framework, self.state, self.total = agent, framework, state, total
        self.checkpoint, self.entered, self.verify = checkpoint, entered, verify
        self.step = 0  # steps in the state; -1 = torn, or given up
        self.fresh = True  # the state is as the script made it
        self.rank, self.world, self.hosts = -1, 0, []
        self.wish = 0
        self.failures = 0  # in a row, of the step that is next
        self.commands = queue.Queue()
        self.lock = threading.Lock()  # over current, and over what breaks the connections of a command that is not wanted any more
        self.current = None  # id of the command that is being done
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        with self.agent.makefile("rb") as lines:
            for line in lines:
                command = json.loads(line)
                if command["do"] == "wish":
                    self.wish = command["step"]
                else:
                    self.commands.put(command)
                    self.interrupt(command["id"])
        self.commands.put(None)
        self.interrupt(None)

    def interrupt(self, by):
        """Breaks the connections of the command before, again and again, for it may just be opening them, until it has ended."""
        while True:
            with self.lock:
                if self.current in (None, by):
                    return
                self.sever()
            time.sleep(0.02)

    def check(self):
        if not self.commands.empty():
            raise Interrupted

    def say(self, **answer):
        try:
            self.agent.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        except OSError:
            raise SystemExit("capstan: the agent has gone") from None

    def work(self):
        while True:
            command = self.commands.get()
            if command is None:
                raise SystemExit("capstan: the agent has gone")
            with self.lock:
                self.current = command["id"]
            answer = None
            try:
                if command["do"] == "run":
                    answer = yield from self.run()
                else:
                    answer = getattr(self, "do_" + command["do"])(command)
                self.check()
            except Interrupted:
                answer = None
            except Lost as lost:
                self.drop()
                answer = {"lost": self.culprit(str(lost))}
            with self.lock:
                self.current = None
            if answer is not None:
                self.say(id=command["id"], **answer)

    def do_warm(self, command):
        self.close()
        if self.checkpoint and os.path.exists(self.checkpoint):
            with open(self.checkpoint, "rb") as f:
                saved = self.framework.loads(f.read())
            self.load(saved["state"])
            self.step = saved["step"]
        elif self.fresh:
            self.step = 0
        else:
            return {"error": "there is no checkpoint, and the state is not as it was at the start: start the command anew"}
        return {"step": self.step}

    def do_enter(self, command):
        self.close()
        os.environ.update(command.get("environment", {}))
        self.wish, self.rank, self.world = 0, command["rank"], command.get("world", 0)
        others = command.get("to", []) + [command[key] for key in ["from"] if key in command]
        with self.lock:
            self.hosts = [m["host"] for m in command.get("members", []) + others]
        if command.get("from"):
            self.step = -1
            self.load(self.framework.loads(self.take(command)))
            self.step = command["step"]
        elif self.step != command["step"]:
            return {"error": f"the state has {self.step} steps, and generation {command['generation']} begins with {command['step']}"}
        if command.get("to"):
            self.give(command)
        if self.rank < 0:
            return {}
        with collective(self):
            self.framework.open(self.rank, self.world, self.check)
            if self.entered:
                self.entered()
        return {"hash": digest(self.collect(), self.framework.raw)} if self.verify else {}

    def run(self):
        self.fresh = False
        while self.step < self.total:
            self.check()
            with collective(self):
                quiesce_at = self.framework.maximum(self.wish)  # on its way while the step computes
            step = Step(self)
            yield step
            if not step.left:
                raise RuntimeError('capstan: the step was not done: put "with step:" around the loop\'s body')
            if step.failure:
                self.failures += 1
                if self.failures >= MAX_FAILURES and isinstance(step.failure, Lost):
                    raise RuntimeError(f"step {self.step + 1} failed {self.failures} times in a row, as by a lost peer") from step.failure
                raise step.failure
            self.failures = 0
            with collective(self):
                quiesce_at = quiesce_at()
            self.say(step=self.step, quiesce_at=quiesce_at, compute=step.compute)
            if 0 < quiesce_at <= self.step < self.total:
                return {}
        return {"finished": True}

    def do_park(self, command):
        self.close()
        return {}

    def do_abort(self, command):
        self.drop()
        return {"step": self.step}

    def do_save(self, command):
        if not self.checkpoint:
            return {"step": self.step}
        temporary = f"{self.checkpoint}.{socket.gethostname()}-{os.getpid()}"
        with open(temporary, "wb") as f:
            f.write(self.framework.dumps({"step": self.step, "state": self.collect()}))
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, self.checkpoint)
        folder = os.open(os.path.dirname(os.path.abspath(self.checkpoint)), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return {"step": self.step}

    def close(self):
        self.framework.close()

    def sever(self):
        """Has every connection to a member fail at once, also one that an object of the script's keeps open."""
        self.framework.abort()
        shut({ip for host in self.hosts for ip in addresses(host)})

    def drop(self):
        self.sever()
        self.close()

    def collect(self):
        return {name: part.state_dict() for name, part in self.state.items()}

    def load(self, state):
        self.fresh = False
        for name, part in self.state.items():
            part.load_state_dict(state[name])

    def culprit(self, error):
        """The rank whose address is in the error; else the next one: whose fault it was, the agents find out."""
        for ip in re.findall(r"\[([0-9a-fA-F.:]+)\]:\d+", error):
            for rank, host in enumerate(self.hosts[: self.world]):
                if rank != self.rank and plain(ip) in addresses(host):
                    return rank
        return (self.rank + 1) % self.world

    def give(self, command):
        """Serves the state to all who are to copy it, each of whom says which generation it is for."""
        data = self.framework.dumps(self.collect())
        wanted, served = {to["ordinal"] for to in command["to"]}, queue.Queue()

        def serve(connection):
            with connection:
                try:
                    connection.settimeout(60)
                    generation, ordinal = connection.makefile("r").readline().split()
                    if generation == command["generation"] and int(ordinal) in wanted:
                        connection.sendall(struct.pack(">Q", len(data)))
                        connection.sendall(data)
                        if connection.recv(1):  # it has all
                            served.put(int(ordinal))
                except (OSError, ValueError):
                    pass  # it calls again

        both = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
        with socket.create_server(("", state_port()), **both) as listener:
            listener.settimeout(0.02)
            while wanted:
                self.check()
                try:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
                except TimeoutError:
                    pass
                while not served.empty():
                    wanted.discard(served.get())

    def take(self, command):
        """Copies the state, and calls again until it has come: a giver that is gone, the agents will notice."""
        me = command["members"][command["rank"]]["ordinal"]
        while True:
            self.check()
            try:
                with socket.create_connection((command["from"]["host"], state_port()), timeout=1) as giver:
                    giver.sendall(f"{command['generation']} {me}\n".encode())
                    giver.settimeout(60)
                    (size,) = struct.unpack(">Q", self.receive(giver, 8))
                    data = self.receive(giver, size)
                    giver.sendall(b".")
                    return data
            except OSError:
                time.sleep(0.02)

    def receive(self, connection, size):
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self.check()
            n = connection.recv_into(view)
            if n == 0:
                raise ConnectionError("closed before its end")
            view = view[n:]
        return data


class Step:
    """One step. It counts as done when the with statement around it has been left without an exception."""

    def __init__(self, child):
        self.child, self.index, self.rank, self.world = child, child.step, child.rank, child.world
        self.left, self.failure, self.compute, self.waited = False, None, 0, None

    def average(self, parameters):
        """Replaces the gradients by their mean over all workers, and so knows how long this one has waited for the others."""
        begun = time.monotonic()
        self.child.framework.average(parameters, self.world)
        self.waited = (self.waited or 0) + time.monotonic() - begun

    def __enter__(self):
        self.begun = time.monotonic()
        return self

    def __exit__(self, kind, error, trace):
        self.left = True
        if error is None:
            self.child.step += 1
            if self.waited is not None:
                self.compute = time.monotonic() - self.begun - self.waited
            return False
        self.failure = broken(self.child, error)
        return self.failure is not None  # what no connection is to blame for is the script's, and ends it


@contextlib.contextmanager
def collective(child):
    """Makes a broken connection one of this module's exceptions."""
    try:
        yield
    except Exception as error:
        raise broken(child, error) or error


def broken(child, error):
    """What a broken connection means: Interrupted if this process broke it, Lost if it did not; None for any other error."""
    if isinstance(error, Interrupted):
        return error
    if isinstance(error, (RuntimeError, OSError)) and not child.commands.empty():
        return Interrupted()
    return Lost(str(error)) if child.framework.lost(error) else None


def shut(ips):
    """Ends this process's TCP connections to those addresses: what waits for one of them then fails at once."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:
            continue  # closed by now
        try:
            with socket.socket(fileno=copy) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and plain(s.getpeername()[0]) in ips:
                    s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected


def addresses(host):
    try:
        return {plain(a[4][0]) for a in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def plain(ip):
    return ip[7:] if ip.startswith("::ffff:") else ip


def state_port():
    """Where the state is copied from: above all ports that generations meet at, of which there are 512."""
    return int(os.environ["MASTER_PORT"]) + 512


def digest(state, raw):
    """16 hexadecimal digits of what is in a state: numbers, strings, tensors (for which raw returns their kind and bytes), and containers."""
    h = hashlib.blake2b(digest_size=8)

    def add(x):
        if isinstance(x, dict):
            h.update(b"{%d" % len(x))
            for key in sorted(x, key=repr):
                add(key)
                add(x[key])
        elif isinstance(x, (list, tuple)):
            h.update(b"[%d" % len(x))
            for y in x:
                add(y)
        elif isinstance(x, (bool, int, float, str, bytes, type(None))):
            h.update(b"=%d" % len(repr(x)) + repr(x).encode())
        else:
            for part in raw(x):
                h.update(part)

    add(state)
    return h.hexdigest()


class Torch:
    """All that is asked of a framework, by PyTorch: a process group, and the bytes of a state."""

    def __init__(self, backend=None):
        import torch
        import torch.distributed

        if int(torch.__version__.split(".")[0]) < 2:
            raise RuntimeError(f"PyTorch {torch.__version__}: want 2.0 or newer, for an older one cannot read a state without running what is in it")
        self.torch, self.dist, self.store = torch, torch.distributed, None
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self.device = "cuda" if self.backend == "nccl" else "cpu"
        if self.backend == "nccl":
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else its watchdog ends the process

    def open(self, rank, world, check):
        """Makes the process group of a generation. It waits for the other members until check raises or a connection is severed."""
        at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        while rank > 0:  # TCPStore itself waits half a second before it tries again
            check()
            try:
                socket.create_connection(at, timeout=1).close()
                break
            except OSError:
                time.sleep(0.01)
        self.store = self.dist.TCPStore(*at, world, rank == 0, timeout=datetime.timedelta(seconds=2), wait_for_workers=False)
        self.store.set_timeout(datetime.timedelta(minutes=30))
        self.dist.init_process_group(self.backend, store=self.store, rank=rank, world_size=world)

    def close(self):
        if self.dist.is_initialized():
            self.dist.destroy_process_group()
        self.store = None

    def abort(self):
        """Frees a thread that waits for NCCL. Others than NCCL have TCP connections, which are severed."""
        if self.backend == "nccl" and self.dist.is_initialized():
            self.dist.distributed_c10d._abort_process_group()

    def lost(self, error):
        """Whether an error says that a connection broke. Gloo has no class for it; its text names the file."""
        return isinstance(error, RuntimeError) and (
            type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
            or re.search(r"gloo/|NCCL|Socket|Connection (reset|closed|refused)|Broken pipe|EADDRINUSE|[Aa]ddress already in use", str(error)) is not None)

    def maximum(self, value):
        """Begins an all-reduce, and returns a function that waits for it."""
        t = self.torch.tensor([value], dtype=self.torch.int64, device=self.device)
        work = self.dist.all_reduce(t, self.dist.ReduceOp.MAX, async_op=True)

        def wait():
            work.wait()
            return int(t)

        return wait

    def average(self, parameters, world):
        gradients = [p.grad for p in parameters if p.grad is not None]
        for work in [self.dist.all_reduce(g, async_op=True) for g in gradients]:
            work.wait()
        for g in gradients:
            g /= world

    def dumps(self, state):
        b = io.BytesIO()
        self.torch.save(state, b)
        return b.getbuffer()

    def loads(self, data):
        return self.torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)

    def raw(self, x):
        if not self.torch.is_tensor(x):
            return [type(x).__name__.encode()]
        flat = x.detach().cpu().contiguous().reshape(-1)
        return [f"{x.dtype} {tuple(x.shape)}".encode(), flat.view(self.torch.uint8).numpy() if flat.numel() else b""]
