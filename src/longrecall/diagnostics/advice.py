"""The next command for each finding, written out for the checkpoint at hand."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longrecall import surgery  # noqa: F401 (importing it registers the methods)
from longrecall.surgery.registry import METHODS


@dataclass(frozen=True)
class Advice:
    """What the commands need: paths, lengths in tokens, (layer, mixer) of every recurrent layer, how many layers."""

    checkpoint: str
    text: str
    training_length: int
    longest: int
    mixers: tuple[tuple[int, str], ...]
    layer_count: int | None

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Advice:
        """Take them from a result; what it does not say becomes a word in capitals for the reader to replace."""
        settings = result["settings"]
        layers = (result.get("state") or {"layers": []})["layers"]
        return cls(
            shlex.quote(result["checkpoint"].get("path") or "CKPT"),
            shlex.quote(settings.get("text") or "TEXT"),
            int(settings["training_length"]),
            int(settings["training_length"]) * int(settings["multiple"]),
            tuple((int(layer["layer"]), str(layer["mixer"])) for layer in layers),
            result["checkpoint"].get("layers"),
        )

    def _train(self, *overrides: str) -> str:
        # TEXT is the reader's: training on the text of a diagnosis would spoil it as a measure.
        sets = [f"model.checkpoint={self.checkpoint}", "data.sources.0.path=TEXT", *overrides]
        return "longrecall train recipes/post_train.yaml " + " ".join(f"--set {item}" for item in sets)

    def state_passing(self) -> str:
        """For a model that meets states it was never trained on."""
        command = self._train(f"data.context_length={self.training_length}", "run.output=trained/")
        return f"post-train with state passing, a small part of pretraining is enough: {command}"

    def diverged(self, late: bool) -> str:
        """For NaN or infinity; `late`: only past the training length."""
        if late:
            norm = "initial_state.clip_norm=100"
            command = self._train(f"data.context_length={self.training_length}", norm, "run.output=trained/")
            return f"post-train with state passing and a limit on the passed state's norm: {command}"
        again = f"longrecall diagnose {self.checkpoint} --text {self.text} --dtype float32"
        return f"see whether higher precision helps, and if it does not, mend the weights first: {again}"

    def learn_recall(self) -> str:
        """For a model that does not recall even within its training length."""
        return f"train on dense recall within the training length, phone books beside text: {self._train()}"

    def longer_recall(self) -> str:
        """For recall that ends past the training length in a state that has room."""
        context = min(self.longest, 4 * self.training_length)
        command = self._train(f"data.context_length={context}", "run.output=trained/")
        return f"train recall over longer contexts with state passing, and expand if that does not help: {command}"

    def measure_state(self) -> str:
        """For recall that ends where the state was not looked at."""
        command = f"longrecall diagnose {self.checkpoint} --text {self.text} --parts state,recall"
        return f"look at the state too, which tells whether to expand or to train: {command}"

    def expand(self) -> str:
        """For recall that ends in a full state: the method that fits the most layers."""
        kinds = [(layer, mixer.partition(" ")[0]) for layer, mixer in self.mixers]
        if any("(" in mixer for _, mixer in self.mixers):
            return f"finish the handover that the checkpoint is in first: {self._train('run.output=trained/')}"
        fits = {name: [layer for layer, kind in kinds if kind in method.mixers] for name, method in METHODS.items()}
        name = max(fits, key=lambda method: len(fits[method]))
        if not fits[name]:
            names = ", ".join(sorted({kind for _, kind in kinds}))
            return f"no method of expand fits {names}; add retrieval, or train with a larger state"
        layers = "all" if len(fits[name]) == self.layer_count else ",".join(map(str, fits[name]))
        command = f"longrecall expand {self.checkpoint} bigger/ --method {name} --layers {layers}"
        return f"expand the state or add retrieval, then post-train: {command}"

    def nothing(self) -> str:
        """For a healthy model."""
        command = f"longrecall eval {self.checkpoint} --tasks phonebook"
        return f"nothing to mend; to see how many associations it holds at once: {command}"
