# %% [markdown]
# # Speculative decoding, and where it pays
#
# Checking is cheaper than generating: one pass of the target over $\gamma + 1$ tokens reads the weights once, as does a pass
# over one token. So let a cheap draft guess $\gamma$ tokens, check them all in one pass, and keep the longest prefix that
# survives. Modified rejection sampling makes the result an exact sample of the target; the only question is speed.

# %%
from fractions import Fraction

import roofline
from roofline.cli.output import table
from roofline.edits import apply, dtype
from roofline.plots import lines_plot
from roofline.speculative.acceptance import (
    acceptance_rate,
    best_length,
    expected_tokens,
    output_distribution,
    residual,
    speedup,
)
from roofline.speculative.rounds import Speculation

cost = Fraction(1, 10)


# %% [markdown]
# ## Lossless
#
# Take a vocabulary of two, where the target $q$ and the draft $p$ disagree. A drafted token is kept with probability $\min(1,
# q/p)$; otherwise one is drawn from the excess $\max(q - p, 0)$. What comes out is $q$, exactly, whatever the draft.

# %%
target, draft = [Fraction(1, 3), Fraction(2, 3)], [Fraction(3, 4), Fraction(1, 4)]
print("kept with probability", acceptance_rate(target, draft))
print("else drawn from      ", *residual(target, draft))
print("what comes out       ", *output_distribution(target, draft))

# %% [markdown]
# ## How many tokens a round gives
#
# If each draft is accepted with probability $\alpha$, a round yields $1 + \alpha + \dots + \alpha^\gamma$ tokens: it
# saturates, while the drafts' cost $\gamma c$ grows. So there is a best length, and it is short unless the draft is very good
# and very cheap.

# %%
lines = {
    f"alpha {float(alpha):g}": [(gamma, speedup(alpha, gamma, cost)) for gamma in range(13)]
    for alpha in (Fraction(5, 10), Fraction(7, 10), Fraction(8, 10), Fraction(9, 10))
}
lines_plot(
    lines, x="Draft length", y="Speed-up", title="Speed-up by draft length, a draft of a tenth of the cost", level=(1.0, "plain"),
    note="a verification as long as one step; alpha: chance that a drafted token is accepted",
)  # fmt: skip

# %%
print(
    table(
        ["alpha", "draft cost", "best length", "tokens per round", "speed-up"],
        [
            [
                f"{float(alpha):g}",
                f"{float(c):g}",
                best[0],
                f"{float(expected_tokens(alpha, best[0])):.2f}",
                f"{float(best[1]):.2f}",
            ]
            for alpha in (Fraction(6, 10), Fraction(7, 10), Fraction(8, 10))
            for c in (Fraction(1, 20), Fraction(1, 10), Fraction(1, 4))
            for best in [best_length(alpha, c)]
        ],
    )
)

# %% [markdown]
# ## On a machine
#
# The formula assumes that a verification takes as long as one step. On a machine that holds while memory binds. Llama 3.1 8B,
# drafted by Llama 3.2 1B on an H100: both as they are, every pass counted kernel by kernel.

# %%
h100 = roofline.load_accelerator("h100-sxm")
large, small = roofline.load_model("llama-3.1-8b"), roofline.load_model("llama-3.2-1b")
pair = Speculation(large, h100, small)
batches = [2**power for power in range(11)]
alpha = Fraction(8, 10)
rows = []
for batch in (1, 16, 64, 256, 1024):
    found = pair.best(batch, 512, alpha)
    rows.append(
        [batch, found.gamma, f"{found.tokens:.2f}", f"{found.draft.bound * 1e3:.2f}", f"{found.verify.bound * 1e3:.2f}",
         f"{found.plain.bound * 1e3:.2f}", f"{found.speedup:.2f}"]
    )  # fmt: skip
print(table(["batch", "best length", "tokens", "drafts ms", "verify ms", "plain step ms", "speed-up"], rows))

# %% [markdown]
# As the batch grows, the $\gamma + 1$ tokens of every sequence fill the matrix units, and a verification costs what it is:
# $\gamma + 1$ steps' arithmetic. The best draft gets shorter, and at some batch drafting stops paying. At long contexts the
# opposite happens: the cache dominates, all tokens of a verification share one reading of it, and drafting keeps paying at
# any batch.

# %%
by_context = {
    f"context {context:,}": [(batch, pair.best(batch, context, alpha).speedup) for batch in batches]
    for context in (128, 512, 4096, 32768)
}
lines_plot(
    by_context, x="Batch [sequences]", y="Speed-up", title="Where speculation pays, by batch and context", x_scale="log2",
    level=(1.0, "plain decoding"), note="Llama 3.1 8B drafted by Llama 3.2 1B on h100-sxm, alpha 0.8, best draft length, bounds",
)  # fmt: skip

# %%
limits = {context: pair.last_paying_batch(context, alpha) for context in (128, 512, 4096, 32768)}
for context, last in limits.items():
    print(f"context {context:6,}: pays {'at every batch' if last is None else f'up to batch {last:,}'}")

# %% [markdown]
# Quantising the target weakens the case: its steps get shorter, and the draft's are what they were.

# %%
quantised = Speculation(apply(large, [dtype("int4-g128")]), h100, small)
for name, setup in (("bf16", pair), ("int4", quantised)):
    found = setup.best(1, 512, alpha)
    print(f"target in {name}: best length {found.gamma}, speed-up {found.speedup:.2f}, {found.tpot.bound * 1e3:.2f} ms per token")

# %% [markdown]
# ## The headline numbers

# %%
assert output_distribution(target, draft) == target
assert expected_tokens(Fraction(8, 10), 4) == Fraction(2101, 625)
assert [best_length(a, Fraction(1, 10))[0] for a in (Fraction(6, 10), Fraction(7, 10), Fraction(8, 10))] == [3, 4, 6]
one, many = pair.best(1, 512, alpha), pair.best(1024, 512, alpha)
assert 1.9 < one.speedup < 2.3
assert one.verify.bound < 1.05 * one.plain.bound
assert many.gamma < one.gamma
assert limits[128] is not None
assert limits[32768] is None
assert quantised.best(1, 512, alpha).speedup < one.speedup
assert quantised.best(1, 512, alpha).tpot.bound < one.tpot.bound
print(f"one user: {one.speedup:.2f} x with {one.gamma} drafts; at context 128 drafting stops paying above batch {limits[128]:,}")
