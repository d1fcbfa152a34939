"""The next command for each finding, written out for the checkpoint at hand."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.diagnostics.plan import MOST_DOUBLINGS
from longrecall.layers.descriptions.retrieval import RetrievalConfig
from longrecall.surgery.method import ANY_MIXER
from longrecall.surgery.registry import METHODS

_LOOKED_INTO = {"", "base", "attention", "ssm", "third"}
"""Fields of mixers in which surgery looks for a mixer that it fits: the base of retrieval, branches side by side."""


@dataclass(frozen=True)
class Advice:
    """What the commands need: paths, lengths in tokens, (layer, mixer) of every recurrent layer.

    `context_length`: the training length that the checkpoint itself states; `sequences`, `doublings`: how many windows
    were asked for, and how often the pass keys of a length might be doubled.
    """

    checkpoint: str
    text: str
    training_length: int
    longest: int
    mixers: tuple[tuple[int, str], ...]
    context_length: int | None
    sequences: int
    doublings: int

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
            result["checkpoint"].get("context_length"),
            int(settings.get("sequences", 1)),
            int(settings.get("recall_doublings", 0)),
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
        again = self._diagnose("--dtype float32")
        return f"see whether higher precision helps; if it does not, repair the weights first: {again}"

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
        command = self._diagnose("--parts state,recall")
        return f"look at the state too, which tells whether to expand or to train: {command}"

    def more_windows(self, part: str, windows: int | None) -> str:
        """For intervals over `windows` windows of the text (None: unknown) that do not settle what `part` asks."""
        return f"{self._longer(windows)}read more windows: {self._again(part, windows)}"

    def more_keys(self) -> str:
        """For pass keys that do not settle whether recall ends."""
        return f"ask more pass keys: {self._again('recall', None)}"

    def full_or_not(self, windows: int) -> str:
        """For recall that ends where it is open whether the state is full."""
        more = f"{self._longer(windows)}read more windows and ask more pass keys"
        return f"{more}, which tells whether to expand or to train: {self._again('state,recall', windows)}"

    def _longer(self, windows: int | None) -> str:
        # Fewer windows than were asked for: the text had no more.
        short = windows is not None and windows < self.sequences
        return "with a longer text, or a smaller --multiple, " if short else ""

    def _again(self, parts: str, windows: int | None) -> str:
        short = windows is not None and windows < self.sequences
        command = self._diagnose(f"--parts {parts}", "LONGER_TEXT" if short else self.text)
        if windows is not None:
            command += f" --sequences {max(2, self.sequences) if short else 4 * self.sequences}"
        doublings = min(self.doublings + 2, MOST_DOUBLINGS)
        return command + (f" --recall-doublings {doublings}" if "recall" in parts else "")

    def _diagnose(self, words: str, text: str | None = None) -> str:
        """Return the command for another diagnosis, as far as this one was."""
        lengths = f" --multiple {self.longest // self.training_length}"
        if self.training_length != self.context_length:
            lengths = f" --training-length {self.training_length}{lengths}"
        return f"longrecall diagnose {self.checkpoint} --text {text or self.text}{lengths} {words}"

    def expand(self) -> str:
        """For recall that ends in a full state: the method that fits the most layers, and retrieval."""
        # "gla", or of a mixer inside another one "gla (old)": its path there.
        found = [(layer, *mixer.rstrip(")").partition(" (")[::2]) for layer, mixer in self.mixers]
        if any(path.rpartition(".")[2] in ("old", "new") for _, _, path in found):
            return f"finish the handover that the checkpoint is in first: {self._train('run.output=trained/')}"
        own = [(layer, kind) for layer, kind, path in found if set(path.split(".")) <= _LOOKED_INTO]
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
        # All that the method fits: those of other kinds are left alone.
        command = f"longrecall expand {self.checkpoint} bigger/ --method {name} --layers all"
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
        return f"no remedy needed; to see how many associations it holds at once: {command}"
