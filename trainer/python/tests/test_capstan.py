"""Tests of capstan.py that need nothing but Python: each worker is a process, with a group of plain TCP connections."""

import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import time
import types
import unittest

here = pathlib.Path(__file__).parent
sys.path[:0] = [str(here.parent), str(here)]
import agent
import capstan


class Case(unittest.TestCase):
    def worker(self, ordinal=0, raw=False, **environment):
        a = agent.Agent([sys.executable, str(here / "worker.py")], raw, **environment)
        self.addCleanup(a.close)
        a.ordinal = ordinal
        return a

    def warm(self, n, **environment):
        workers = [self.worker(2 * i, **environment) for i in range(n)]
        for w in workers:
            self.assertEqual(w.ask("warm"), {"step": 0})
        return workers

    def boundary(self, workers, run, wisher=0, ahead=3):
        """Has one wish to stop, and returns the step after which all have."""
        at = workers[wisher].steps[-1]["step"] + ahead if workers[wisher].steps else 1
        workers[wisher].tell("wish", step=at)
        for w in workers:
            self.assertEqual(w.answer(run[w]), {})
        last = {w.steps[-1]["step"] for w in workers}
        self.assertEqual(len(last), 1, "they stopped after different steps")
        (last,) = last
        self.assertGreaterEqual(last, at)
        for w in workers:
            told = [s["step"] for s in w.steps]
            self.assertEqual(told, list(range(told[0], last + 1)), "a step is missing, or was told twice")
            self.assertEqual(w.steps[-1]["quiesce_at"], at)
            self.assertEqual(w.ask("park"), {})
        return last


class TestRing(Case):
    def test_alone(self):
        (a,) = self.warm(1)
        run = agent.Ring().form([a], 0)
        a.until(5)
        self.boundary([a], run)

    def test_finished(self):
        (a,) = self.warm(1, TOTAL="7")
        ring = agent.Ring()
        self.assertEqual(a.answer(ring.form([a], 0)[a]), {"finished": True})
        self.assertEqual([s["step"] for s in a.steps], [1, 2, 3, 4, 5, 6, 7])
        self.assertEqual(a.answer(ring.form([a], 7)[a]), {"finished": True})
        self.assertEqual(a.steps, [])

    def test_grow_and_shrink(self):
        a, b, c = self.warm(3)
        ring = agent.Ring()
        run = ring.form([a, b], 0)
        b.until(4)
        n = self.boundary([a, b], run, wisher=1)
        pids = [w.process.pid for w in (a, b, c)]
        run = ring.form([a, b, c], n, source=b, behind=[c])
        c.until(n + 4)
        n = self.boundary([a, b, c], run)
        run = ring.form([a, c], n)
        c.until(n + 4)
        self.boundary([a, c], run, wisher=1)
        self.assertEqual([w.process.pid for w in (a, b, c)], pids)

    def test_state_of_a_leaver(self):
        a, b, c = self.warm(3)
        ring = agent.Ring()
        n = self.boundary([a], ring.form([a], 0))
        run = ring.form([b, c], n, source=a, behind=[b, c])
        b.until(n + 3)
        self.boundary([b, c], run)

    def test_peer_killed(self):
        a, b, c = self.warm(3)
        ring = agent.Ring()
        run = ring.form([a, b, c], 0)
        a.until(5)
        c.process.kill()
        begun = time.monotonic()
        lost = [w.answer(run[w])["lost"] for w in (a, b)]
        self.assertTrue(set(lost) <= {0, 1, 2}, lost)
        at = {w: w.ask("abort")["step"] for w in (a, b)}
        self.assertLess(time.monotonic() - begun, 3)
        self.assertLessEqual(abs(at[a] - at[b]), 1)
        ahead = max((a, b), key=at.get)
        behind = [w for w in (a, b) if at[w] < at[ahead]]
        run = ring.form([a, b], at[ahead], source=ahead, behind=behind)
        b.until(at[ahead] + 3)
        self.boundary([a, b], run)

    def test_peer_stopped(self):
        a, b = self.warm(2)
        ring = agent.Ring()
        ring.form([a, b], 0)
        a.until(5)
        b.process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        self.assertEqual(a.process.poll(), None)
        begun = time.monotonic()
        step = a.ask("abort")["step"]
        self.assertLess(time.monotonic() - begun, 3)  # the agent's patience is 4 s
        self.assertIn(step - a.steps[-1]["step"], (0, 1))  # one may have been applied and never told of
        run = ring.form([a], step)
        a.until(step + 3)
        b.process.send_signal(signal.SIGCONT)  # what the zombie does now is of no more interest
        self.boundary([a], run)

    def test_member_never_comes(self):
        for rank in (0, 1):
            with self.subTest(rank=rank):
                a, b = self.warm(2)
                ring = agent.Ring()
                ring.start([a, b] if rank == 0 else [b, a], 0)
                b.process.kill()
                time.sleep(0.1)
                self.assertEqual(a.ask("abort"), {"step": 0})
                n = self.boundary([a], ring.form([a], 0))
                self.assertGreater(n, 0)

    def test_state_never_comes(self):
        a, b = self.warm(2)
        b.process.send_signal(signal.SIGSTOP)
        ring = agent.Ring()
        ring.start([a, b], 9, source=b, behind=[a])
        time.sleep(0.1)
        self.assertEqual(a.ask("abort"), {"step": -1})
        self.assertIn("the state has -1 steps", a.answer(ring.start([a], 0)[a])["error"])
        self.assertEqual(a.ask("warm"), {"step": 0})  # for the state is as the script made it
        ring.form([a], 0)

    def test_taker_never_comes(self):
        a, b = self.warm(2)
        b.process.kill()
        ring = agent.Ring()
        ring.start([a, b], 0, source=a, behind=[b])
        time.sleep(0.1)
        self.assertEqual(a.ask("abort"), {"step": 0})
        ring.form([a], 0)
        a.until(3)

    def test_state_is_not_for_everybody(self):
        a, b = self.warm(2)
        b.process.send_signal(signal.SIGSTOP)
        ring = agent.Ring()
        ids = ring.start([a, b], 0, source=a, behind=[b])
        for line in (b"1.9 2\n", b"1.1 5\n", b"hello\n", b"\n"):  # another generation, another ordinal, nothing of the kind
            with self.stranger(ring) as s:
                s.sendall(line)
                self.assertEqual(s.recv(1), b"", line)
        b.process.send_signal(signal.SIGCONT)
        self.assertEqual(a.answer(ids[a]), b.answer(ids[b]))

    def stranger(self, ring):
        """A connection to who gives the state."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", ring.port + 512), timeout=10)
            except ConnectionRefusedError:
                time.sleep(0.01)

    def test_stopped_giver(self):
        a, b = self.warm(2, STATE="30000000")
        ring = agent.Ring()
        n = self.boundary([a], ring.form([a], 0))
        ids = ring.start([b], n, source=a, behind=[b])
        time.sleep(0.05)  # it may be in the midst of the copy by now
        a.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        self.assertIn(b.ask("abort"), ({"step": -1}, {"step": n}))
        self.assertLess(time.monotonic() - begun, 3)

    def test_checkpoint(self):
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "checkpoint")
            (a,) = self.warm(1, CHECKPOINT=path)
            self.assertIn("start the command anew", self.after_a_step(a)["error"])
            (a,) = self.warm(1, CHECKPOINT=path)
            n = self.boundary([a], agent.Ring().form([a], 0))
            self.assertEqual(a.ask("save"), {"step": n})
            self.assertEqual(os.listdir(d), ["checkpoint"])
            self.assertEqual(self.after_a_step(a, n), {"step": n})
            b = self.worker(0, CHECKPOINT=path)
            self.assertEqual(b.ask("warm"), {"step": n})
            agent.Ring().form([b], n)

    def after_a_step(self, a, n=0):
        """Warms one up again that has trained meanwhile, in the midst of its steps."""
        agent.Ring().form([a], n)
        a.until(n + 2)
        return a.ask("warm")


class TestScript(Case):
    def ends(self, text, **environment):
        (a,) = self.warm(1, **environment)
        run = agent.Ring().form([a], 0)
        with self.assertRaises(EOFError):
            a.answer(run[a])
        self.assertEqual(a.process.wait(timeout=10), 1)
        self.assertRegex(a.stderr().strip().split("\n")[-1], text)

    def test_error(self):
        self.ends("^RuntimeError: loss is NaN$", HOW="wrong")

    def test_no_peer_to_blame(self):
        (a,) = self.warm(1, HOW="loses")
        ring = agent.Ring()
        files = set()  # open ones, after each
        for step in [0] + 8 * [3]:
            self.assertEqual(a.answer(ring.form([a], step)[a]), {"lost": 0})
            self.assertEqual(a.ask("abort"), {"step": 3})
            files.add(len(os.listdir(f"/proc/{a.process.pid}/fd")))
        self.assertEqual(len(files), 1, files)
        run = ring.form([a], 3)
        with self.assertRaises(EOFError):
            a.answer(run[a])
        self.assertIn("step 4 failed 10 times in a row", a.stderr())

    def test_no_with(self):
        self.ends('put "with step:" around', HOW="no with")

    def test_agent_gone(self):
        (a,) = self.warm(1)
        agent.Ring().form([a], 0)
        a.until(2)
        a.socket.shutdown(2)
        self.assertEqual(a.process.wait(timeout=10), 1)
        self.assertIn("the agent has gone", a.stderr())

    def test_no_agent(self):
        os.environ.pop("CAPSTAN_SOCKET", None)
        with self.assertRaisesRegex(RuntimeError, "capstan-agent --in-place"):
            capstan.steps({}, 1)


class TestCulprit(unittest.TestCase):
    def test_culprit(self):
        c = types.SimpleNamespace(hosts=["10.1.0.4", "10.1.0.5", "fd00::9", "10.1.0.7"], rank=2, world=3)  # the last one only gives its state
        at = lambda text: capstan.Child.culprit(c, text)
        self.assertEqual(at("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.1.0.5]:26840. This"), 1)
        self.assertEqual(at("Read error [::ffff:10.1.0.5]:26840: Connection reset by peer"), 1)
        self.assertEqual(at("Connection closed by peer [10.1.0.7]:1"), 0)
        self.assertEqual(at("Connection closed by peer [fd00::9]:1"), 0)
        self.assertEqual(at("Broken pipe"), 0)


class TestDigest(unittest.TestCase):
    def test_digest(self):
        raw = lambda x: [repr(x).encode()]
        d = lambda x: capstan.digest(x, raw)
        self.assertRegex(d({}), "^[0-9a-f]{16}$")
        self.assertEqual(d({"a": 1, "b": [1.5, None]}), d({"b": (1.5, None), "a": 1}))
        different = [{}, [], 1, 1.0, "1", b"1", True, None, [1, 2], [[1], 2], [1, [2]], ["12"], ["1", "2"], {"1": 2}, {"12": ""}, {1: 2}, object]
        self.assertEqual(len({d(x) for x in different}), len(different))


class TestReadme(Case):
    """The exchange in the README is what is really said, byte for byte."""

    def test_exchange(self):
        text = (here.parent / "README.md").read_text()
        block = re.search(r"```text\n(> \{.*?)```", text, re.S).group(1)
        a = self.worker(TOTAL="2", raw=True)
        port = str(agent.free_port())
        lines, heard = block.strip().split("\n"), a.socket.makefile("r")
        for line in lines:
            mark, said = line[:2], line[2:]
            if mark == "> ":
                a.socket.sendall(said.replace("10.1.0.4", "127.0.0.1").replace("29507", port).encode() + b"\n")
            else:
                self.assertEqual(heard.readline(), said + "\n")
        self.assertGreater(len(lines), 12)


if __name__ == "__main__":
    unittest.main()
