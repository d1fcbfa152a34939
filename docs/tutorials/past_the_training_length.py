# %% [markdown]
# # Cure a model that breaks past its training length
#
# A transformer sees each token of its context directly. A recurrent model sees its **state**: a table of numbers that
# every token changes a little. So its ten-thousandth token is predicted from a state that ten thousand tokens have
# made.
#
# In training the rows are short, and every row starts from an empty state. The model never meets the state that a
# long text leads to. Some models then go wrong there: the state grows out of the range that the layers know. Their
# loss rises, and the longer the text, the higher.
#
# The cure is called **state passing**. A training row starts from the state that another row has left, not from an
# empty one. So short rows show the model the states of long texts. In this notebook you
#
# 1. make a model ill, and let `diagnose` find out what it has,
# 2. train it on for a moment, once as usual and once with state passing,
# 3. plot the loss by position.
#
# Nothing is downloaded. It needs no GPU and less than a minute.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

import longrecall
from longrecall.diagnostics import diagnose_checkpoint
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe

# %% tags=["parameters"]
STEPS = 100  # training steps of each of the two models
LENGTH = 64  # tokens of a training row
MULTIPLE = 32  # how many times this length is read when we measure
WINDOWS = 8  # pieces of text that are read
FOLDER = "runs/tutorials/past_the_training_length"  # everything is written here

# %%
assets = Path(longrecall.__file__).parent / "assets"
base, text = assets / "mamba2-base", assets / "text"
folder = Path(FOLDER)
folder.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(1)  # so small a model gains little from more, and a busy machine can make it far slower

# %% [markdown]
# ## A patient
#
# The Mamba-2 that ships with longrecall is healthy at these lengths. We make it ill, so that you can see the illness
# and the cure in a minute. In each layer `A_log` says how fast the state forgets. We subtract 6 from it: the state
# now forgets some 400 times as slowly, and what it reads piles up.

# %%
model = longrecall.load(base, dtype="float32")
with torch.no_grad():
    for layer in model.model.layers:
        layer.mixer.A_log -= 6.0
ill = folder / "ill"
model.save_pretrained(ill)
AutoTokenizer.from_pretrained(base).save_pretrained(ill)

# %% [markdown]
# ## Diagnosis
#
# `diagnose` reads a book that no model here was trained on. It measures the loss by position: how well the model
# predicts the 10th token, the 100th, the 1000th. Then it says what is wrong. `nats` are the unit of the loss.


# %%
def examine(checkpoint):
    """Print the verdict on a checkpoint and return its loss by range of positions."""
    result = diagnose_checkpoint(
        checkpoint,
        text / "held_out.txt",
        training_length=LENGTH,
        multiple=MULTIPLE,
        sequences=WINDOWS,
        parts=["perplexity"],
        progress=False,
    )
    for finding in result["verdict"]:
        print(f"{finding['finding']}: {finding['text']}")
    return result["perplexity"]


print("The model as it ships")
healthy = examine(base)
print("\nThe patient")
before = examine(ill)

# %% [markdown]
# ## Two trainings
#
# Both read the same rows of the same books for the same number of steps. They differ in one line, `initial_state`.
# Plain training is the **control**: what it mends, any training would have mended.


# %%
def train(kind):
    """Train the patient with this initial state and return the folder of the trained model."""
    recipe = folder / f"{kind}.yaml"
    recipe.write_text(f"""
model: {{checkpoint: {ill}}}
data:
  context_length: {LENGTH}
  sources: [{{kind: text, path: {text / "train.txt"}}}]
optimizer: {{learning_rate: 5e-4, schedule: cosine, hold: 0.5}}
initial_state: {{kind: {kind}}}
run: {{output: {folder / kind}, steps: {STEPS}, batch_size: 16, report_to: none}}
""")
    done = run_recipe(Recipe.load(recipe), show_progress=False, force=True)
    print(f"{done.steps} steps of {LENGTH}-token rows, {done.tokens:,} tokens")
    return done.checkpoint


print("Plain training: every row starts from the empty state")
plain = examine(train("zero"))
print("\nState passing: a row starts from the state that another row has left")
passed = examine(train("state_passing"))

# %% [markdown]
# ## Your plot

# %%
figure, axes = plt.subplots(figsize=(6.5, 4))
lines = {
    "the patient": (before, "tab:red", "-"),
    "plain training": (plain, "tab:orange", "-"),
    "state passing": (passed, "tab:blue", "-"),
    "the model as it ships": (healthy, "0.5", "--"),
}
for label, (ranges, color, style) in lines.items():
    positions = [(entry["start"] + entry["end"]) / 2 for entry in ranges]
    axes.plot(positions, [entry["loss"] for entry in ranges], color=color, linestyle=style, label=label)
axes.axvline(LENGTH, color="0.7", linestyle=":", label="length of a training row")
axes.set(xscale="log", xlabel="position in the text, tokens", ylabel="loss, nats per token")
axes.legend()
figure.savefig(folder / "loss_by_position.svg")

# %% [markdown]
# A healthy line is flat to the right of the dotted mark. It wanders a little, because some pages are harder than
# others. All lines read the same pages. So compare a line with the dashed one at the same place:

# %%
near = next(index for index, entry in enumerate(before) if entry["start"] >= LENGTH)
for index in (near, len(before) - 1):
    print(f"Loss of positions {before[index]['start']} to {before[index]['end']}, above that of the model as it ships:")
    for label in ("the patient", "plain training", "state passing"):
        print(f"  {label}: {lines[label][0][index]['loss'] - healthy[index]['loss']:+.2f} nats")

# %% [markdown]
# The first three numbers stand just behind the training length, the others at the end. Compare them: a cure may cost
# something where the model was not ill.

# %% [markdown]
# We have made this illness by hand, and trained for one short run with one seed. Models become ill by themselves,
# too. [length_generalization.md](../length_generalization.md) follows such models to 64k tokens, with three seeds,
# and says what state passing costs. Where a model is healthy it does not help: diagnose first.
#
# Do it with a checkpoint of yours: `longrecall diagnose CKPT --text TEXT` says whether it needs the cure
# ([diagnostics.md](../diagnostics.md)), and `recipes/post_train.yaml` has it ([training.md](../training.md)).
