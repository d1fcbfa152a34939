"""A mixture of experts, the channel mixer of which every token takes a few parts only: its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear, under
from longrecall.layers.descriptions.mlp import MLPConfig, checked_activation

ROUTERS = ("softmax", "top_k_softmax", "sigmoid")


@dataclass(frozen=True)
class MoEConfig(MixerConfig):
    """Sizes of a mixture of experts.

    | family | fields |
    |---|---|
    | Qwen3-Next, Qwen3.5 | `shared_size`, `shared_gate` true |
    | Jamba | `normalise` false |
    | Granite 4 H | `router` "top_k_softmax", `shared_size` |
    | Kimi-Linear | `router` "sigmoid", `correction_bias` true, `scale`, `groups`, `active_groups`, `shared_size` |
    | Nemotron-H | as Kimi-Linear; `gated` false, `activation` "relu2", `latent_size` |
    """

    type: ClassVar[str] = "moe"
    layer_class: ClassVar[str] = "longrecall.layers.moe:MixtureOfExperts"
    optional_fields: ClassVar[tuple[str, ...]] = (
        "gated",
        "activation",
        "correction_bias",
        "groups",
        "active_groups",
        "scale",
        "router_in_fp32",
        "latent_size",
        "shared_size",
        "shared_gate",
        "bias",
    )
    positionwise: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("mask",)

    num_experts: int
    """Experts E that the router chooses from."""
    top_k: int
    """How many of them a token is sent to."""
    inner_size: int
    """Inner width I of one expert."""
    router: str = "softmax"
    """Where the weights of the chosen experts come from, with l the router's logits: "softmax" (the largest of
    softmax(l)), "top_k_softmax" (the softmax of the largest l) or "sigmoid" (the largest of sigmoid(l))."""
    normalise: bool = True
    """Divide the weights of a token's experts by their sum ("top_k_softmax" has that sum anyway)."""
    balance: float = 0.001
    """Weight of the loss that makes all experts used alike; 0 = none."""
    gated: bool = True
    """Whether every expert, the shared one too, has a gate."""
    activation: str = "silu"
    """As that of an `mlp`."""
    correction_bias: bool = False
    """A bias of each expert's score that decides who is chosen and has no part in the weights; "sigmoid" alone."""
    groups: int = 1
    """Groups of neighbouring experts, of which `active_groups` are chosen first: those with the largest sums of two
    scores; "sigmoid" alone."""
    active_groups: int = 1
    scale: float = 1.0
    """What the weights are multiplied with in the end."""
    router_in_fp32: bool = False
    """Form the logits in float32 whatever the model's dtype is; softmax and sigmoid always are."""
    latent_size: int | None = None
    """Width in which the experts work, between two projections that they share; None = the model's."""
    shared_size: int = 0
    """Inner width of an expert that every token goes to (of several, side by side: their sum); 0 = none."""
    shared_gate: bool = False
    """A sigmoid gate, one number a token, of the shared expert."""
    bias: bool = False
    """Biases of the shared expert and of the projections around the experts; the experts have none."""

    def __post_init__(self) -> None:
        self._require_positive("num_experts", "top_k", "inner_size", "groups", "active_groups")
        self._require_positive(*(["latent_size"] if self.latent_size is not None else []))
        object.__setattr__(self, "activation", checked_activation(self.type, self.activation))
        if self.router not in ROUTERS:
            raise UserError(
                f'mixer "{self.type}": router must be one of {", ".join(ROUTERS)}, got {self.router!r}.'
                f"{did_you_mean(str(self.router), ROUTERS)}"
            )
        for name in ("balance", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise UserError(f'mixer "{self.type}": {name} must be a number from 0, got {value!r}')
        if not isinstance(self.shared_size, int) or isinstance(self.shared_size, bool) or self.shared_size < 0:
            raise UserError(f'mixer "{self.type}": shared_size must be a whole number >= 0, got {self.shared_size!r}')
        self._check_together()

    def _check_together(self) -> None:
        """Raise UserError where fields do not fit each other."""
        self._require_multiple("num_experts", "groups")
        if self.active_groups > self.groups:
            raise UserError(
                f'mixer "{self.type}": active_groups ({self.active_groups}) cannot be more than groups ({self.groups})'
            )
        open_to_choice = self.num_experts // self.groups * self.active_groups
        if self.top_k > open_to_choice:
            raise UserError(
                f'mixer "{self.type}": top_k ({self.top_k}) cannot be more than the {open_to_choice} experts that '
                "there are to choose from"
            )
        if self.active_groups < self.groups and self.num_experts < 2 * self.groups:
            raise UserError(f'mixer "{self.type}": every one of the {self.groups} groups needs two experts or more')
        if self.router != "sigmoid" and (self.correction_bias or self.groups > 1):
            raise UserError(f'mixer "{self.type}": correction_bias and groups need the router "sigmoid"')
        if self.router == "top_k_softmax" and not self.normalise:
            raise UserError(f'mixer "{self.type}": weights of the router "top_k_softmax" already sum to 1')
        if self.shared_gate and not self.shared_size:
            raise UserError(f'mixer "{self.type}": shared_gate needs a shared expert, but shared_size is 0')

    @property
    def shared(self) -> MLPConfig | None:
        """The shared expert, if there is one."""
        if not self.shared_size:
            return None
        return MLPConfig(self.shared_size, gated=self.gated, activation=self.activation, bias=self.bias)

    def state_shapes(self) -> StateShapes:
        return {}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        return self._shapes(hidden_size, self.num_experts)

    def active_tensor_shapes(self, hidden_size: int) -> TensorShapes:
        return self._shapes(hidden_size, self.top_k)

    def _shapes(self, hidden_size: int, experts: int) -> TensorShapes:
        width = hidden_size if self.latent_size is None else self.latent_size
        up, rows = ("gate_up_proj", 2 * self.inner_size) if self.gated else ("up_proj", self.inner_size)
        shapes: TensorShapes = {"correction_bias": (self.num_experts,)} if self.correction_bias else {}
        shapes |= linear("router", self.num_experts, hidden_size)
        shapes |= {f"experts.{up}": (experts, rows, width), "experts.down_proj": (experts, width, self.inner_size)}
        if self.latent_size is not None:
            shapes |= linear("latent_in", width, hidden_size, bias=self.bias)
            shapes |= linear("latent_out", hidden_size, width, bias=self.bias)
        if self.shared is not None:
            shapes |= under("shared", self.shared.tensor_shapes(hidden_size))
        return shapes | (linear("shared_gate", 1, hidden_size) if self.shared_gate else {})
