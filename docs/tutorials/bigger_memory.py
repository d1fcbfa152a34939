# %% [markdown]
# # Give a Mamba-2 a bigger memory
#
# A transformer keeps the keys and values of every token that it has read. This cache grows with the text.
#
# A recurrent model keeps no token. It has a **state**: a table of numbers of a fixed size. Each token changes the
# table a little. The next token is predicted from the table, so what is not in it any more cannot be used.
#
# A small state is cheap, and it is soon full. In this notebook you
#
# 1. look at the state of a small Mamba-2 that ships with longrecall,
# 2. measure how many things it can hold at once,
# 3. enlarge the state of the trained model and train it on for a moment,
# 4. plot what that has changed.
#
# Nothing is downloaded. It needs no GPU and about a minute.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

import longrecall
from longrecall.evaluation.checkpoint import evaluate_checkpoint
from longrecall.training.recipe import Recipe
from longrecall.training.run import run_recipe

# %% tags=["parameters"]
STEPS = 120  # training steps of each of the two models
SAMPLES = 512  # questions for each point of the plot
FOLDER = "runs/tutorials/bigger_memory"  # everything is written here

# %%
base = Path(longrecall.__file__).parent / "assets" / "mamba2-base"
folder = Path(FOLDER)
folder.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(1)  # so small a model gains little from more, and a busy machine can make it far slower

# %% [markdown]
# ## The state
#
# We let the model read a short text and a long one. `past_key_values` is where a transformer returns its cache. A
# recurrent model returns its state there. The tokens of this model are bytes.

# %%
model = longrecall.load(base, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(base)


def read(model, text):
    """Return what the model predicts for each next token, and its state after the text."""
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        answer = model(ids, use_cache=True)
    return answer.logits, answer.past_key_values


sentence = "The sea was calm that morning, and nobody spoke. "
for text in (sentence, 20 * sentence):
    logits, state = read(model, text)
    table = sum(layer["recurrent"].numel() for layer in state.layers)
    inputs = sum(layer["conv"].numel() for layer in state.layers)
    print(f"{len(text):4} bytes read: {table:,} numbers in the tables, {inputs:,} of the last few inputs")

# %% [markdown]
# The longer text fills nothing more: it has to fit into the same tables, one in each layer. Beside its table a layer
# keeps the inputs of the last three tokens, for a short convolution. They reach no further back.
#
# ## What it can hold
#
# The test is a **phone book**. The model reads a list of names with numbers. Then it is asked for some of them:
#
# ```
# q 4
# b 0
# t 7
# ?b 0
# ```
#
# The last `0` is the answer that the model has to give. A list of more names is harder, because all of them must be
# in the state at the same time.

# %%
PAIRS = (4, 8, 16, 24)


def recall(checkpoint):
    """Return for each number of pairs the share of right answers, and its 95% interval."""
    book = {"pairs": PAIRS, "letters": 1, "digits": 1}
    result = evaluate_checkpoint(
        checkpoint, ["phonebook"], [512], SAMPLES, dtype="float32", options={"phonebook": book}, progress=False
    )
    return [(point["value"], point["low"], point["high"]) for point in result["results"]]


before = recall(base)
for pairs, (value, low, high) in zip(PAIRS, before, strict=True):
    print(f"{pairs:2} pairs: {value:.0%} right (95% interval {low:.0%} to {high:.0%})")

# %% [markdown]
# ## Surgery
#
# `longrecall.expand` makes a new checkpoint from the old one. The method `grow_state` gives each head of a Mamba-2 a
# larger table. What the head did with the old one it goes on doing.

# %%
summary = longrecall.expand(
    base, folder / "bigger", method="grow_state", layers="all", init="perturb", seed=0, force=True
)
print(f"state: {summary.state_before:,} -> {summary.state_after:,} numbers")
print(f"parameters: {summary.parameters_before:,} -> {summary.parameters_after:,}")

bigger = longrecall.load(folder / "bigger", dtype="float32")
change = torch.softmax(read(bigger, sentence)[0], -1) - torch.softmax(read(model, sentence)[0], -1)
print(f"largest change of a predicted probability: {change.abs().max():.3f}")

# %% [markdown]
# With `init="preserve"` this last number would be 0: the new model says exactly what the old one says. We took
# `init="perturb"`, which also adds noise to the old weights. At first the model gets worse: compare the first losses
# below. But the weights leave their place sooner, and our training is short. In a long one `preserve` is as good.
#
# ## Training
#
# The model does not use the new places yet. It has to learn to. We train it on phone books alone.
#
# Training on phone books might help without a larger state, too. So the old model gets the same training. It is the
# **control**. What the larger state brings is the difference between the two.
#
# `touched: 4x` lets the parts that surgery has touched learn four times as fast as the others.


# %%
def train(checkpoint, name):
    """Train a checkpoint on phone books and return the folder of the trained one."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(f"""
model: {{checkpoint: {checkpoint}}}
data:
  context_length: 256
  sources: [{{kind: phonebook, pairs: [4, 26], letters: 1, digits: 1}}]
optimizer: {{learning_rate: 1e-3, touched: 4x, schedule: cosine, hold: 0.5}}
run: {{output: {folder / name}, steps: {STEPS}, batch_size: 8, report_to: none}}
""")
    done = run_recipe(Recipe.load(recipe), show_progress=False, force=True)
    print(f"{name}: {done.tokens:,} tokens, loss {done.first_loss:.2f} at first, {done.last_loss:.2f} in the end")
    return done.checkpoint


enlarged = recall(train(folder / "bigger", "enlarged"))
control = recall(train(base, "control"))

# %% [markdown]
# ## Your plot

# %%
figure, axes = plt.subplots(figsize=(6, 4))
lines = {
    "before": (before, "0.5", "o"),
    "trained on, same state (control)": (control, "tab:orange", "s"),
    "trained on, larger state": (enlarged, "tab:blue", "^"),
}
for label, (points, color, marker) in lines.items():
    axes.plot(PAIRS, [value for value, _, _ in points], color=color, marker=marker, label=label)
    axes.fill_between(PAIRS, [low for _, low, _ in points], [high for _, _, high in points], color=color, alpha=0.15)
axes.axhline(0.1, color="0.7", linestyle=":", label="guessing a digit")
axes.set(xlabel="names in the phone book", ylabel="share of right answers", ylim=(0, 1.02), xticks=PAIRS)
axes.legend()
figure.savefig(folder / "recall.svg")

# %% [markdown]
# The bands are 95% intervals. Read the two trained lines where the list is longest:

# %%
(ours, low, high), (theirs, control_low, control_high) = enlarged[-1], control[-1]
print(f"{PAIRS[-1]} pairs: {before[-1][0]:.0%} before, control {theirs:.0%}, larger state {ours:.0%}")
if low > control_high:
    print("The interval of the larger state lies above that of the control.")
elif high < control_low:
    print("The interval of the larger state lies below that of the control: this training has done harm.")
else:
    print("The two intervals overlap: this run does not show a difference. Try more steps or more samples.")

# %% [markdown]
# This was one short run with one seed, on phone books alone. Trained like this, the model forgets other things, such
# as how English goes on. `longrecall demo` does the whole job: a mixture of texts, a control, a report. It takes five
# minutes. [evidence.md](../evidence.md) has long runs with three seeds.
#
# Do it with a checkpoint of yours: [surgery.md](../surgery.md) has a method for each kind of model, and
# [training.md](../training.md) has the recipes.
