"""What a run would take on so many GPUs: bytes by kind, FLOPs and hours, from the recipe and the config alone.

Weights, gradients and moments are counted exactly. Activations are an estimate: what the matrices of a layer give and
read, which is what training keeps (GPU kernels recompute the rest). `tests/training/test_planning.py` holds it against
a measured peak. Work inside a layer (chunks of a recurrence, a softmax) comes on top for one layer at a time.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from longrecall.errors import UserError
from longrecall.files import expand_home
from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.models.distillation import NUMBERS
from longrecall.models.outline import open_outline
from longrecall.models.sizes import LayerConfig, ModelSizes
from longrecall.ops.cross_entropy.op import piece_tokens
from longrecall.training.initial_states import learned_shapes
from longrecall.training.leash import teacher_of
from longrecall.training.optimizer import trained_names
from longrecall.training.parallel.place import replicas
from longrecall.training.recipe import Recipe
from longrecall.training.recipe_states import LearnedRecipe, ZeroState
from longrecall.training.summary import BUFFERS
from longrecall.units import format_bytes

H200_TFLOPS = {"bf16": 989.0, "fp16": 989.0, "fp32": 67.0}
"""Dense peak of an NVIDIA H200 (its data sheet) in the type that run.precision multiplies in."""
UTILISATION = 0.4
"""Share of the peak that a run reaches, where nothing is known of it."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BACK = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Ends of the names of matrices that give back to the residual stream, which is counted by itself."""
_CHUNK = 64
"""Tokens between two states that a recurrence has in memory while one layer works."""
_READ_BEFORE_WRITING = ("delta", "kda", "rwkv7")
"""Parts of the names of mixers that read the state before they write it: three products with it a token, not two."""


@dataclass(frozen=True)
class Hardware:
    """What the run has.

    Attributes:
        gpus: processes, one GPU each.
        peak_tflops: of one GPU; None = an H200 in the recipe's precision.
        utilisation: share of the peak that is reached.
    """

    gpus: int = 1
    peak_tflops: float | None = None
    utilisation: float = UTILISATION

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.gpus < 1:
            raise UserError(f"--gpus must be at least 1, got {self.gpus}")
        if not 0 < self.utilisation <= 1:
            raise UserError(f"--utilisation is a share of the peak between 0 and 1, got {self.utilisation}")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise UserError(f"--peak-tflops must be above 0, got {self.peak_tflops}")


@dataclass(frozen=True)
class RunPlan:
    """What a run would take.

    Attributes:
        parameters, active_parameters, trained_parameters: numbers; what one token meets; what the run changes.
        gpus, replicate, shard, context: the mesh.
        tokens_per_step, steps, tokens: of the whole run.
        bytes_per_gpu: kind -> bytes at the peak of a step.
        whole_logits_bytes: what comes on top where the loss is not fused (there is no Triton).
        flops_per_token: part -> FLOPs of a trained token, forward, backward and recomputation together.
        flops_per_step, hours: of all GPUs; at `utilisation` of `peak_tflops`.
    """

    model: str
    parameters: int
    active_parameters: int
    trained_parameters: int
    gpus: int
    replicate: int
    shard: int
    context: int
    tokens_per_step: int
    steps: int
    tokens: int
    bytes_per_gpu: dict[str, int]
    whole_logits_bytes: int
    flops_per_token: dict[str, int]
    flops_per_step: int
    peak_tflops: float
    utilisation: float
    hours: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"total_bytes_per_gpu": sum(self.bytes_per_gpu.values())}

    def table(self) -> str:
        """Lines for people."""
        trained, active = self.trained_parameters, self.active_parameters
        notes = [f"{trained:,} trained"] if trained != self.parameters else []
        notes += [f"{active:,} active"] if active != self.parameters else []
        mesh = f"replicate {self.replicate} x shard {self.shard} x context {self.context}"
        lines = [
            f"model              {self.model}",
            f"parameters         {self.parameters:,}" + (f" ({', '.join(notes)})" if notes else ""),
            f"GPUs               {self.gpus}: {mesh}",
            f"tokens a step      {self.tokens_per_step:,}",
            f"steps              {self.steps:,}, {self.tokens:,} tokens",
            "",
            f"{'bytes a GPU':<28}{'at the peak':>12}",
            *(f"{kind:<28}{format_bytes(count):>12}" for kind, count in self.bytes_per_gpu.items()),
            f"{'together':<28}{format_bytes(sum(self.bytes_per_gpu.values())):>12}",
            f"{'(more if logits not fused)':<28}{format_bytes(self.whole_logits_bytes):>12}",
            "",
            f"{'FLOPs a token':<28}{'':>12}",
            *(f"{part:<28}{count:>12.3g}" for part, count in self.flops_per_token.items()),
            f"{'FLOPs a step':<28}{self.flops_per_step:>12.3g}",
            f"{'FLOPs of the run':<28}{self.flops_per_step * self.steps:>12.3g}",
            "",
            f"time               {_in_words(self.hours)} at {self.utilisation:.0%} of {self.gpus} x "
            f"{self.peak_tflops:,.0f} TFLOP/s",
        ]
        return "\n".join(lines)


def _in_words(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    minutes = math.ceil(hours * 60)
    return f"{minutes} minutes" if minutes > 1 else "a minute at most"


def plan_run(recipe: Recipe, hardware: Hardware) -> RunPlan:
    """Return what the run of a recipe takes; reads a config or a description, no weights and no data.

    Raises:
        UserError: no config, a pattern of the optimizer that matches nothing, a mesh that does not fit the GPUs.
    """
    try:
        outline = open_outline(recipe.model.checkpoint)
    except UserError as error:
        if expand_home(recipe.model.checkpoint).exists():
            raise
        raise UserError(
            f"{error}; a config.json or a description is enough for --plan: --set model.checkpoint=FILE.json"
        ) from error
    config = outline.plain
    shapes = {name: shape for name, shape in config.tensor_shapes().items() if not name.endswith(BUFFERS)}
    names = list(shapes)
    if isinstance(recipe.initial_state, LearnedRecipe):
        learned = list(learned_shapes(recipe.initial_state, outline.config))
        names = learned if recipe.initial_state.freeze else names + learned
    trained = set(trained_names(names, recipe.optimizer))
    mesh = recipe.parallel
    replicate = replicas(mesh, hardware.gpus)
    readers = hardware.gpus // mesh.context
    flops = _flops(recipe, config, shapes, trained)
    held = _bytes(recipe, config, shapes, trained, copies=replicate if replicate == hardware.gpus else 1)
    if recipe.leash is not None:
        teacher = open_outline(recipe.leash.teacher or teacher_of(outline.surgery)).plain
        flops["leash"] = _leash_flops(recipe, config, teacher, trained)
        held |= _leash_bytes(recipe, config, teacher)
    per_step = recipe.tokens_per_step(readers)
    steps = recipe.steps(readers)
    flops_per_step = per_step * sum(flops.values())
    peak = hardware.peak_tflops or H200_TFLOPS[_computed(recipe)]
    seconds = flops_per_step * steps / (hardware.gpus * peak * 1e12 * hardware.utilisation)
    return RunPlan(
        model=recipe.model.checkpoint,
        parameters=_numbers(shapes),
        active_parameters=_numbers(shapes) - sum(_idle(layer, config.hidden_size) for layer in config.layer_configs()),
        trained_parameters=_numbers({name: shapes[name] for name in trained if name in shapes}),
        gpus=hardware.gpus,
        replicate=replicate,
        shard=mesh.shard,
        context=mesh.context,
        tokens_per_step=per_step,
        steps=steps,
        tokens=per_step * steps,
        bytes_per_gpu=held,
        whole_logits_bytes=_tokens(recipe) * config.vocab_size * (8 + _width(recipe)),
        flops_per_token=flops,
        flops_per_step=flops_per_step,
        peak_tflops=peak,
        utilisation=hardware.utilisation,
        hours=round(seconds / 3600, 3),
    )


def _computed(recipe: Recipe) -> str:
    """In which type matrices are multiplied."""
    return "bf16" if recipe.model.dtype == "bfloat16" else recipe.run.precision


def _width(recipe: Recipe) -> int:
    """Bytes of a number that a matrix gives."""
    return 4 if _computed(recipe) == "fp32" else 2


def _tokens(recipe: Recipe) -> int:
    """Tokens of one forward pass on one GPU."""
    return recipe.run.batch_size * recipe.data.context_length // recipe.parallel.context


def _numbers(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _idle(layer: LayerConfig, hidden: int) -> int:
    """Parameters of a layer that one token does not meet."""
    return sum(
        _numbers(part.tensor_shapes(hidden)) - _numbers(part.active_tensor_shapes(hidden)) for _, part in layer.parts()
    )


def _bytes(
    recipe: Recipe, config: ModelSizes, shapes: dict[str, tuple[int, ...]], trained: set[str], copies: int
) -> dict[str, int]:
    """Return kind -> bytes of one GPU; `copies`: whole models that average their gradients, 1 where it is sharded."""
    pieces = recipe.parallel.shard * recipe.parallel.context
    own, width, tokens = _BYTES[recipe.model.dtype], _width(recipe), _tokens(recipe)
    held = own * _numbers(shapes) // pieces
    moved = own * _numbers({name: shapes[name] for name in trained if name in shapes}) // pieces
    layers = config.layer_configs()
    largest = max(_layer_numbers(layer, config.hidden_size) for layer in layers)
    found = {
        "weights" if own == width else "master weights": held,
        "gradients": moved,
        "optimizer (two moments)": 2 * moved,
    }
    if pieces > 1:
        rest = _numbers({name: shape for name, shape in shapes.items() if not name.startswith("model.layers.")})
        # Two layers (the next one comes while one works) and the gradients of one; the rest is whole all the time.
        found["gathered weights"] = 2 * own * rest + (2 * width + 4) * largest
    elif own != width:
        cast = _numbers({name: shape for name, shape in shapes.items() if len(shape) > 1 and "embeddings" not in name})
        found["weights as computed"] = width * cast
    if copies > 1:
        found["gradient buckets"] = moved
    stream = own * config.hidden_size
    each = [_kept(layer, config.hidden_size, stream, width) for layer in layers]
    if recipe.run.gradient_checkpointing:
        found["activations"] = tokens * (stream * len(layers) + max(each))
    else:
        found["activations"] = tokens * sum(each)
    found["work of one layer"] = tokens * max(_work(layer, width) for layer in layers)
    carried = 1 if isinstance(recipe.initial_state, ZeroState) else 2
    found["recurrent states"] = 4 * carried * recipe.run.batch_size * config.state_size()
    # A fused loss keeps the gradients of the hidden states, sums those of the head in float32, and a piece of logits.
    piece = piece_tokens(tokens, config.vocab_size, width)
    found["loss"] = tokens * config.hidden_size * width + config.vocab_size * (4 * config.hidden_size + width * piece)
    return found


def _layer_numbers(layer: LayerConfig, hidden: int) -> int:
    return sum(_numbers(part.tensor_shapes(hidden)) for _, part in layer.parts())


def _kept(layer: LayerConfig, hidden: int, stream: int, width: int) -> int:
    """Return the bytes that the backward pass needs of one token in one layer.

    Of every block: the residual stream before its norm, the normed input, what the matrices give (but the last, which
    adds to the stream), and what the last one reads; an MLP's product of gate and input is made again.
    """
    total = 0
    for _, part in layer.parts():
        matrices = {
            name: shape
            for name, shape in part.active_tensor_shapes(hidden).items()
            if len(shape) >= 2 and not name.endswith("conv.weight")
        }
        given = sum(math.prod(shape[:-1]) for name, shape in matrices.items() if not name.endswith(_BACK))
        read = [shape[-1] for name, shape in matrices.items() if name.endswith(_BACK)]
        last = 0 if isinstance(part, MLPConfig) else max(read, default=0)
        total += stream + width * (hidden + given + last)
    return total


def _work(layer: LayerConfig, width: int) -> int:
    """Return the bytes a token that a layer has in memory while its backward pass runs: its states, chunk by chunk."""
    return 2 * 4 * layer.state_size() // _CHUNK


def _flops(recipe: Recipe, config: ModelSizes, shapes: dict[str, tuple[int, ...]], trained: set[str]) -> dict[str, int]:
    """Return part -> FLOPs of one trained token: forward, gradients of inputs, of weights, and what is made again."""
    layers, hidden = config.layer_configs(), config.hidden_size
    states = any(name.startswith("initial_state.") for name in trained)
    reached = (
        0 if states or any(not n.startswith(("model.layers.", "lm_head", "model.norm")) for n in trained) else None
    )
    if reached is None:
        reached = min(
            (int(name.split(".")[2]) for name in trained if name.startswith("model.layers.")), default=len(layers)
        )
    again = 1 if recipe.run.gradient_checkpointing else 0
    matrices = recurrence = attention = 0.0
    for index, layer in enumerate(layers):
        inputs = 1 if index >= reached else 0
        own = f"model.layers.{index}."
        share = _numbers({n: s for n, s in shapes.items() if n.startswith(own) and n in trained}) / max(
            1, _numbers({n: s for n, s in shapes.items() if n.startswith(own)})
        )
        matrices += _products(layer, hidden) * (1 + again + inputs + share)
        walks = 1 + again + 2 * inputs
        recurrence += walks * sum(_recurrence(part) for _, part in layer.parts())
        attention += walks * sum(_attention(part, recipe.data.context_length) for _, part in layer.parts())
    head = 2 * config.vocab_size * hidden * _head_products(config, trained)
    found = {"matrices of the layers": matrices, "recurrences": recurrence, "attention": attention, "head": head}
    return {part: round(count) for part, count in found.items() if count}


def _products(layer: LayerConfig, hidden: int) -> int:
    """Return the FLOPs of a token that goes through the matrices of a layer once."""
    shapes = [shape for _, part in layer.parts() for shape in part.active_tensor_shapes(hidden).values()]
    return 2 * sum(math.prod(shape) for shape in shapes if len(shape) >= 2)


def _head_products(config: ModelSizes, trained: set[str]) -> int:
    """How often a token meets the head: forward, its own gradient, and the head's where that is trained."""
    return 2 + ("lm_head.weight" in trained or config.tie_word_embeddings)


def _leash_flops(recipe: Recipe, config: ModelSizes, teacher: ModelSizes, trained: set[str]) -> int:
    """Return the FLOPs of a trained token for the leash: the teacher reads, and both heads predict once more.

    Rows that are not held are not read, except where documents are packed side by side.
    """
    assert recipe.leash is not None
    sources, length = recipe.data.sources, recipe.data.context_length
    chosen = recipe.leash.chosen(sources)
    weights = [source.weight for source in sources]
    share = sum(weight for weight, own in zip(weights, chosen, strict=True) if own) / sum(weights)
    parts = [part for layer in teacher.layer_configs() for _, part in layer.parts()]
    read = sum(_products(layer, teacher.hidden_size) for layer in teacher.layer_configs())
    read += sum(_recurrence(part) for part in parts)
    attention = sum(_attention(part, length) for part in parts)
    packed = recipe.data.reset_documents or recipe.continues
    compared = share * min(length, recipe.leash.length or length) / length * bool(recipe.leash.weight)
    heads = teacher.hidden_size + config.hidden_size * _head_products(config, trained)
    return round((read + attention) * (1 if packed else share) + 2 * config.vocab_size * heads * compared)


def _leash_bytes(recipe: Recipe, config: ModelSizes, teacher: ModelSizes) -> dict[str, int]:
    """Return kind -> bytes of one GPU for the leash, at most: every row is held."""
    assert recipe.leash is not None
    pieces, tokens = recipe.parallel.shard * recipe.parallel.context, _tokens(recipe)
    own, layers = _BYTES[recipe.leash.dtype or recipe.model.dtype], teacher.layer_configs()
    shapes = {name: shape for name, shape in teacher.tensor_shapes().items() if not name.endswith(BUFFERS)}
    weights = own * _numbers(shapes) // pieces
    if pieces > 1:
        # As the model's own, but without gradients: two layers, and the rest all the time.
        rest = _numbers({name: shape for name, shape in shapes.items() if not name.startswith("model.layers.")})
        weights += own * rest + 2 * _width(recipe) * max(_layer_numbers(layer, teacher.hidden_size) for layer in layers)
    stream = tokens * config.hidden_size * _BYTES[recipe.model.dtype]
    # Every stream of the model (inputs of layers that are computed again are there anyway), and of the teacher where
    # they are compared; what both heads read, and its gradient; the head's gradient; five times some logits in float32.
    compared = stream * (0 if recipe.run.gradient_checkpointing else len(config.layer_configs()))
    compared += tokens * own * teacher.hidden_size * (len(layers) if recipe.leash.hidden else 0)
    compared += 3 * stream + 4 * config.vocab_size * config.hidden_size
    compared += 5 * 4 * min(NUMBERS, tokens * config.vocab_size)
    return {"teacher's weights": weights, "leash": compared}


def _recurrence(part: MixerConfig) -> int:
    """Return the FLOPs of a token that write and read the state once."""
    products = 3 if any(word in part.type for word in _READ_BEFORE_WRITING) else 2
    return 2 * products * part.state_size()


def _attention(part: MixerConfig, context: int) -> float:
    """Return the FLOPs of a token with the keys and values before it, on average over a sequence."""
    total = 0.0
    for numbers, window in part.caches():
        kept = context if window is None else min(context, window)
        heads = int(getattr(part, "num_heads", 1))
        total += 2 * heads / int(getattr(part, "kv_heads", None) or heads) * numbers * kept * (1 - kept / (2 * context))
    return total
