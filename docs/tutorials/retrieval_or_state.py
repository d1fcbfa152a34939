# %% [markdown]
# # Retrieval against a larger state
#
# A transformer can look at any earlier token again. A recurrent model cannot: it has its **state**, a table of
# numbers of a fixed size, and the text is gone. Two things help a model that must find an exact entry again:
#
# - a **larger state** holds more entries at once;
# - **retrieval** keeps the text. It is cut into small chunks. Each token picks the chunks that resemble it most, and
#   attends to their tokens. The recurrent layer stays as it is beside that.
#
# In this notebook you train three very small models from scratch, one with a small state, one with a larger state,
# and one with the small state and retrieval. Then you plot how much each recalls.
#
# Nothing is downloaded. It needs no GPU and less than a minute.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import yaml

from longrecall.sweep.recipe import SweepRecipe
from longrecall.sweep.run import run_sweep
from longrecall.tasks.mqar import Mqar

# %% tags=["parameters"]
EPOCHS = 8  # times that each model sees its training rows
ROWS = 2048  # training rows of each kind
TEST_ROWS = 128  # rows for each point of the plot
FOLDER = "runs/tutorials/retrieval_or_state"  # everything is written here

# %%
folder = Path(FOLDER)
folder.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(1)  # so small a model gains little from more, and a busy machine can make it far slower

# %% [markdown]
# ## The task
#
# The task is **multi-query associative recall** (MQAR). A row begins with pairs of a key and a value. Later each key
# comes again, and the model has to say its value. Keys and values are drawn anew in each row, so they cannot be
# learned by heart. This is one row:

# %%
VOCABULARY = 64
keys, values = Mqar(length=16, pairs=2, vocab_size=VOCABULARY).batch(np.random.default_rng(0), 1, "test")
print("the row:    ", " ".join(f"{token:2}" for token in keys[0]))
print("the answers:", " ".join(f"{token:2}" if token >= 0 else " ." for token in values[0]))

# %% [markdown]
# The tests grow in two ways. In some there are more pairs. In others there are as many, but the question comes later:
# in a row of 512 tokens the pair may lie 500 tokens back. The training rows have 32 tokens and at most 8 pairs.

# %%
PAIRS = {2: 32, 4: 32, 8: 32, 16: 64, 24: 96}  # pairs: tokens of the row
LENGTHS = (32, 128, 512)  # of rows with FAR_PAIRS pairs; every place in the row is equally likely to ask
FAR_PAIRS = 8

by_pairs = [{"pairs": pairs, "length": length} for pairs, length in PAIRS.items()]
by_length = [{"pairs": FAR_PAIRS, "length": length, "power": 1.0} for length in LENGTHS]
tests = [{**settings, "rows": TEST_ROWS} for settings in by_pairs + by_length]

# %% [markdown]
# ## Three models
#
# All have two layers of the type Gated DeltaNet and a width of 32. In each layer the state is a table of `key_dim`
# times `value_dim` numbers.
#
# Retrieval stands in the first layer. A chunk is two tokens long, so it holds exactly one pair, and each token reads
# one chunk. This is the setting of the paper. It fits this task very well: keep that in mind when you see the result.

# %%
SMALL = {"type": "gated_delta_net", "num_heads": 1, "key_dim": 4, "value_dim": 32, "label": "small"}
LARGE = {**SMALL, "key_dim": 32, "label": "large"}
RETRIEVAL = {"layer": 0, "chunk": 2, "top_k": 1, "encoder_dim": "width", "num_heads": 1, "head_dim": "width"}


def train(name, mixer, retrieval):
    """Train one model and return the row of its result: sizes, steps, accuracy of each test."""
    recipe = {
        "tasks": [
            {
                "name": "mqar",
                "settings": {"vocab_size": VOCABULARY},
                "train": [{"length": 32, "pairs": pairs, "rows": ROWS} for pairs in (2, 8)],
                "test": tests,
            }
        ],
        "models": {"mixers": [mixer], "hidden_sizes": 32, "layers": 2, "retrieval": [retrieval]},
        "training": {"epochs": EPOCHS, "batch_size": 64, "learning_rates": [0.01], "stop_at": 0.99},
        "run": {"output": str(folder / f"{name}.json")},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    row = run_sweep(SweepRecipe.load(path), show_progress=False, force=True).rows[0]
    print(f"{name}: {row['parameters']:,} parameters, a state of {row['state_size']:,} numbers, {row['steps']} steps")
    return row


rows = {
    "small state": train("small", SMALL, None),
    "larger state": train("large", LARGE, None),
    "small state and retrieval": train("retrieval", SMALL, RETRIEVAL),
}

# %% [markdown]
# A training ends early when a model is right in 99% of the answers of every test.
#
# Retrieval has a price that the state size does not show. It keeps the tokens of the text and a vector for each
# chunk, so its memory grows with the text, as a transformer's cache does, though far more slowly
# ([retrieval.md](../retrieval.md) counts it).
#
# ## Your plot

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
colors = {"small state": "tab:orange", "larger state": "tab:blue", "small state and retrieval": "tab:green"}
for label, row in rows.items():
    accuracy = [test["accuracy"] for test in row["tests"]]
    left.plot(list(PAIRS), accuracy[: len(PAIRS)], marker="o", color=colors[label], label=label)
    right.plot(LENGTHS, accuracy[len(PAIRS) :], marker="o", color=colors[label], label=label)
left.axvline(8, color="0.7", linestyle=":", label="most pairs of a training row")
left.set(xlabel="pairs in the row", ylabel="share of right answers", ylim=(-0.02, 1.04), xticks=list(PAIRS))
right.set(xlabel=f"tokens of a row with {FAR_PAIRS} pairs", xscale="log", xticks=LENGTHS, xticklabels=LENGTHS)
right.minorticks_off()
right.legend(*left.get_legend_handles_labels(), loc="center")
figure.tight_layout()
figure.savefig(folder / "recall.svg")

# %% [markdown]
# In numbers, at the two hardest tests:

# %%
most, farthest = max(PAIRS), max(LENGTHS)
for label, row in rows.items():
    at_most, at_farthest = row["tests"][len(PAIRS) - 1]["accuracy"], row["tests"][-1]["accuracy"]
    print(f"{label}: {at_most:.0%} of {most} pairs, {at_farthest:.0%} of {FAR_PAIRS} pairs in {farthest} tokens")

# %% [markdown]
# On the right the tokens between are all the same blank, 0. Text is harder: it goes on writing into the state.
#
# Each line is one seed, trained for seconds. A model that has not learned the task yet looks like one that cannot
# hold it: raise `EPOCHS` and look again.
#
# Which of the two should you take? A larger state costs the same at each token, however long the text. Retrieval
# needs the text kept, finds exact entries however far back, and helps only where a chunk of the text holds the
# answer. [retrieval_evidence.md](../retrieval_evidence.md) has harder tests, more models, and several seeds.
#
# Do it with a checkpoint of yours: `longrecall expand` has the method `add_retrieval` and methods for a larger state
# ([surgery.md](../surgery.md)). Both need some training afterwards.
