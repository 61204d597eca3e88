# %% [markdown]
# # Shrinking the KV cache
#
# A decode step reads the whole cache of every sequence, and attention's intensity there is below one whatever one does
# ([lecture](lecture.ipynb)). So a long context costs memory twice: in capacity, which limits the batch, and in bandwidth,
# which sets the time per token. This notebook applies each known remedy to one model, and then looks at models that were
# built with them.

# %%
import roofline
from roofline import edits
from roofline.cli.output import table
from roofline.edits import apply
from roofline.plots import kv_plot, lines_plot

GIB = 2**30
contexts = [2**power for power in range(13, 21)]
h200 = roofline.load_accelerator("h200-sxm")
base = roofline.load_model("llama-2-13b")

# %% [markdown]
# ## One model, each remedy by itself
#
# Llama 2 13B caches keys and values of 40 heads in 40 layers: 800 KiB per token. Every edit below changes one thing and keeps
# the rest. What it does to the quality of the model is another question, which arithmetic cannot answer.
#
# * **GQA**: several query heads share a key and a value. **MLA**: a latent of 512 numbers and 64 rotated ones per token and
#   layer, expanded on demand.
# * **CLA**: layers share in pairs. **Window**: only the last 4,096 tokens. **Hybrid**: every fourth layer sees everything.
# * **Fixed state**: three layers of four become gated DeltaNet, whose state does not grow. **fp8**: the same numbers, one
#   byte each.

# %%
remedies = {
    "MHA, 40 KV heads": [],
    "GQA, 8 KV heads": [edits.kv_heads(8)],
    "MLA, rank 512": [edits.mla_rank(512)],
    "CLA, pairs of layers": [edits.share_kv_every(2)],
    "window of 4,096": [edits.window(4096)],
    "hybrid, 1 of 4 global": [edits.pattern("LLLG:4096")],
    "fixed state, 3 of 4": [edits.swap_attention("gated-deltanet:3of4")],
    "fp8 cache": [edits.kv_dtype("fp8")],
    "GQA + CLA + fp8": [edits.kv_heads(8), edits.share_kv_every(2), edits.kv_dtype("fp8")],
}
models = {label: apply(base, chosen) for label, chosen in remedies.items()}


def cached(model, context):
    """GiB of one sequence."""
    return float(model.state_bytes(context)) / GIB


print(
    table(
        ["remedy", "8Ki GiB", "128Ki GiB", "1Mi GiB", "smaller at 128Ki"],
        [
            [
                label,
                *(f"{cached(model, n):,.2f}" for n in (2**13, 2**17, 2**20)),
                f"{cached(base, 2**17) / cached(model, 2**17):.1f} x",
            ]
            for label, model in models.items()
        ],
    )
)

# %%
shown = list(models.items())[:7]
kv_plot(dict(shown), contexts, accelerator=h200, title="Llama 2 13B, one remedy at a time")

# %% [markdown]
# Lines that differ by a factor are parallel: heads, latents, shared layers and formats move the line down. Windows and fixed
# states bend it. A hybrid bends only until its global layers take over, and then runs parallel again, one quarter as high.
#
# ## What it buys
#
# The same cache decides how many sequences fit, and so the tokens per second. At 32Ki tokens, on one H200:

# %%
context = 2**15
rows, speed = [], {}
for label, model in models.items():
    deployment = roofline.Deployment(model, h200)
    most = deployment.largest_batch(context).size
    step = deployment.decode(most, context)
    speed[label] = (most, step.output_tok_per_s)
    alone = deployment.decode(1, context)
    rows.append([label, most, f"{step.bound_s * 1e3:.1f}", f"{step.output_tok_per_s:,.0f}", f"{alone.bound_s * 1e3:.2f}"])
print(table(["remedy", "largest batch", "TPOT ms there", "tok/s", "TPOT ms alone"], rows))

# %% [markdown]
# A full memory takes about the same time to read whatever fills it, so throughput follows the number of sequences: a cache
# five times smaller holds more than five times as many, because the weights are paid once. Sharing between layers is the
# exception: every layer still *reads* the cache that it shares, so CLA fits twice the sequences into steps that take twice as
# long.
#
# ## Models that were built this way
#
# MLA in DeepSeek-V3; a lightning indexer beside it in V3.2 (DSA: it *reads* a selection, but *stores* everything, and the
# index too); compressed attention in V4 (CSA keeps one entry for 4 tokens, HCA one for 128); windows in Gemma 3; fixed states
# in Mamba-2 and, for most of their layers, in Kimi Linear and Nemotron-H.

# %%
names = (
    "llama-3.1-8b", "gemma-3-27b-it", "deepseek-v3", "deepseek-v3.2", "deepseek-v4-pro", "kimi-linear-48b-a3b", "nemotron-h-8b",
    "mamba2-2.7b",
)  # fmt: skip
built = {name: roofline.load_model(name) for name in names}
kv_plot(built, contexts, title="Built for long contexts")

# %% [markdown]
# Storing is one half; reading is the other. The bytes of state that one decode step of one sequence reads show what a
# selection is for: at a million tokens DSA reads less than MLA, though it stores more.

# %%
streams = ("state", "index")


def read(model, n):
    """GiB of cache and index that a decode step of one sequence reads."""
    cost = roofline.Deployment(model, h200).decode(1, n).cost
    return float(sum(cost.read.get(stream, 0) for stream in streams)) / GIB


lines = {name: [(n, read(model, n)) for n in contexts] for name, model in built.items() if name != "nemotron-h-8b"}
lines_plot(
    lines, x="Context [tokens]", y="Read per decode step [GiB]", title="What a decode step reads",
    x_scale="log2", y_scale="log10", note="cache and index of one sequence, all layers",
)  # fmt: skip

# %% [markdown]
# ## The headline numbers

# %%
assert base.kv_bytes_per_token == 800 * 1024
assert cached(base, 2**20) == 800.0
assert cached(base, 2**17) / cached(models["GQA, 8 KV heads"], 2**17) == 5
assert abs(cached(base, 2**17) / cached(models["MLA, rank 512"], 2**17) - 2 * 40 * 128 / (512 + 64)) < 1e-9
assert cached(models["window of 4,096"], 2**20) == cached(models["window of 4,096"], 2**13) == 4096 * 800 * 1024 / GIB
assert speed["GQA, 8 KV heads"][0] > 5 * speed["MHA, 40 KV heads"][0]
assert speed["CLA, pairs of layers"][1] < 1.2 * speed["MHA, 40 KV heads"][1]
assert cached(built["mamba2-2.7b"], 2**13) == cached(built["mamba2-2.7b"], 2**20)
assert cached(built["deepseek-v3"], 2**20) / cached(built["deepseek-v4-pro"], 2**20) > 13
stored = {name: cached(built[name], 2**20) for name in ("deepseek-v3", "deepseek-v3.2")}
assert stored["deepseek-v3.2"] > stored["deepseek-v3"]
assert read(built["deepseek-v3.2"], 2**20) < read(built["deepseek-v3"], 2**20) / 3
million = {name: cached(model, 2**20) for name, model in (("Llama 2 13B", base), ("DeepSeek-V4-Pro", built["deepseek-v4-pro"]))}
print("a million tokens:", ", ".join(f"{name} {size:,.1f} GiB" for name, size in million.items()))
