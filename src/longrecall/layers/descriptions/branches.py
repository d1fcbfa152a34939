"""What layers of several mixers side by side share: the branches, their states and what holds them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longrecall.layers.descriptions.base import NO_ROOM, MixerConfig, StateShapes


@dataclass(frozen=True)
class BranchesConfig(MixerConfig):
    """Mixers of any type that read the same input: the fields that `nested` names, of which some may be None."""

    def branches(self) -> dict[str, MixerConfig]:
        """The branches that there are, by name."""
        found = {name: getattr(self, name) for name in self.nested}
        return {name: config for name, config in found.items() if config is not None}

    def to_dict(self) -> dict[str, Any]:
        branches = self.branches()
        kept = {name: value for name, value in super().to_dict().items() if name in branches or name not in self.nested}
        return kept | {name: config.to_dict() for name, config in branches.items()}

    def state_shapes(self) -> StateShapes:
        return {
            f"{path}.{name}": shape
            for path, config in self.branches().items()
            for name, shape in config.state_shapes().items()
        }

    def why_no_room(self) -> str | None:
        # Token ids have room around a whole layer only.
        found = [f"{one.type} {NO_ROOM}" if one.reads_tokens else one.why_no_room() for one in self.branches().values()]
        return next((reason for reason in found if reason is not None), None)
