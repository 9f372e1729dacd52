"""A real PyTorch job, examples/ddp.py over gloo, whose workers come, leave, die and hang. Skipped where there is no PyTorch 2."""

import importlib.metadata
import os
import pathlib
import signal
import sys
import tempfile
import time
import unittest

here = pathlib.Path(__file__).parent
sys.path[:0] = [str(here.parent), str(here)]
import agent


def version():
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@unittest.skipUnless(version()[0] in "23456789", f"this Python has no PyTorch 2: {version()}")
class TestDDP(unittest.TestCase):
    def setUp(self):
        d = tempfile.TemporaryDirectory()
        self.addCleanup(d.cleanup)
        self.checkpoint = os.path.join(d.name, "job.pt")
        self.workers = []
        for ordinal in range(3):
            w = agent.Agent([sys.executable, str(here.parent / "examples" / "ddp.py"), "600", self.checkpoint],
                            PYTHONPATH=str(here.parent), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
            self.addCleanup(w.close)
            w.ordinal = ordinal
            self.workers.append(w)
        for w in self.workers:
            self.assertEqual(w.ask("warm", timeout=60), {"step": 0})
        self.ring = agent.Ring()

    def test_changes(self):
        a, b, c = self.workers
        # 2: the initial weights are not the same, so all copy the first one's.
        run = self.ring.form([a, b], 0, source=a, behind=[b])
        step = self.boundary([a, b], run, after=30)
        # 3: a joiner copies the state, which has Adam's moments by now.
        begun = time.monotonic()
        run = self.ring.form([a, b, c], step, source=b, behind=[c])
        formed = time.monotonic() - begun
        step = self.boundary([a, b, c], run, after=step + 30)
        # 2: the last one leaves.
        begun = time.monotonic()
        run = self.ring.form([a, b], step)
        shrunk = time.monotonic() - begun
        step = self.boundary([a, b], run, after=step + 30)
        # 3, and one is killed in the midst of a step.
        run = self.ring.form([a, b, c], step, source=a, behind=[c])
        a.until(step + 30)
        c.process.kill()
        begun = time.monotonic()
        for w in (a, b):
            self.assertIn("lost", w.answer(run[w]))
        step = self.aborted([a, b])
        lost = time.monotonic() - begun
        self.assertLess(lost, 3)
        # 2, and one hangs: the other's collective does not end by itself.
        run = self.ring.form([a, b], step[0], source=step[1], behind=step[2])
        a.until(step[0] + 30)
        b.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        begun = time.monotonic()
        step = a.ask("abort")["step"]
        hung = time.monotonic() - begun
        self.assertLess(hung, 2)
        # 1, in the process that there was from the beginning, to the end.
        run = self.ring.form([a], step)
        self.assertEqual(a.answer(run[a], timeout=60), {"finished": True})
        self.assertEqual(a.steps[-1]["step"], 600)
        self.assertEqual(a.ask("save"), {"step": 600})
        print(f"formed 3 in {formed:.3f} s, 2 in {shrunk:.3f} s; a loss was over in {lost:.3f} s, a hang in {hung:.3f} s", file=sys.stderr)
        self.assertGreater(self.accuracy(), 0.9)

    def boundary(self, workers, run, after):
        workers[0].until(after)
        workers[-1].tell("wish", step=after + 5)
        for w in workers:
            self.assertEqual(w.answer(run[w]), {})
        (last,) = {w.steps[-1]["step"] for w in workers}
        for w in workers:
            self.assertEqual(w.ask("park"), {})
        return last

    def aborted(self, workers):
        """The newest state that there is, who has it, and who has not."""
        at = {w: w.ask("abort")["step"] for w in workers}
        ahead = max(workers, key=at.get)
        return at[ahead], ahead, [w for w in workers if at[w] < at[ahead]]

    def accuracy(self):
        import torch

        saved = torch.load(self.checkpoint, weights_only=True)
        self.assertEqual(saved["step"], 600)
        model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        model.load_state_dict(saved["state"]["model"])
        x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1 << 40))
        return (model(x).argmax(1) == (x[:, 0] * x[:, 1] > 0)).float().mean().item()


if __name__ == "__main__":
    unittest.main()
