"""The next command for each finding, written out for the checkpoint at hand."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall import surgery  # noqa: F401 (importing it registers the methods)
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.surgery.registry import ANY_MIXER, METHODS


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
        """For recall that ends in a full state: the method that fits the most layers, and retrieval."""
        # "gla", or of a mixer inside another one "gla (old)": its path there.
        found = [(layer, *mixer.rstrip(")").partition(" (")[::2]) for layer, mixer in self.mixers]
        if any(path.rpartition(".")[2] in ("old", "new") for _, _, path in found):
            return f"finish the handover that the checkpoint is in first: {self._train('run.output=trained/')}"
        own = [(layer, kind) for layer, kind, path in found if path in ("", "base")]
        fits = {
            name: [layer for layer, kind in own if kind in method.mixers]
            for name, method in METHODS.items()
            if method.mixers != ANY_MIXER
        }
        name = max(fits, key=lambda method: len(fits[method]))
        retrieval = self._add_retrieval(sorted({layer for layer, _, path in found if not path.startswith("base")}))
        if not fits[name]:
            names = ", ".join(sorted({kind for _, kind, _ in found}))
            return f"no method of expand enlarges the state of {names}; {retrieval or 'train with a larger state'}"
        layers = "all" if len(fits[name]) == self.layer_count else ",".join(map(str, fits[name]))
        command = f"longrecall expand {self.checkpoint} bigger/ --method {name} --layers {layers}"
        return "; or ".join([f"expand the state, then post-train: {command}", *([retrieval] if retrieval else [])])

    def _add_retrieval(self, layers: Sequence[int]) -> str:
        """Words and command for three of `layers`, those without retrieval; nothing where there is none."""
        if not layers or self.training_length < 2:
            return ""
        # As RESONA's appendix has it: the first, the middle and the last.
        chosen = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        # Eight chunks a training sequence, so that there is something to choose from.
        chunk = max(1, min(RetrievalConfig.chunk, self.training_length // 8))
        command = f"longrecall expand {self.checkpoint} retrieving/ --method add_retrieval"
        return f"add retrieval, then post-train: {command} --layers {','.join(map(str, chosen))} --chunk {chunk}"

    def nothing(self) -> str:
        """For a healthy model."""
        command = f"longrecall eval {self.checkpoint} --tasks phonebook"
        return f"nothing to mend; to see how many associations it holds at once: {command}"
