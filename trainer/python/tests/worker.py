"""A script that trains without a framework: its state is a list of the steps that it has done. How it does them, $HOW says."""

import os
import pathlib
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parent)]
import capstan
from star import Star


class History:
    def __init__(self):
        self.steps = []

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


how = os.environ.get("HOW", "well")
history = History()
ballast = History()
ballast.steps = ["x" * int(os.environ.get("STATE", 0))]
for step in capstan.steps({"history": history, "ballast": ballast}, int(os.environ.get("TOTAL", 1000)), os.environ.get("CHECKPOINT"), framework=Star()):
    if how == "no with":
        continue
    with step:
        time.sleep(0.002)
        if how == "wrong" and step.index == 5:
            raise RuntimeError("loss is NaN")
        if how == "loses" and step.index == 3:
            raise ConnectionError("as if a peer had gone")
        history.steps.append(step.index)
