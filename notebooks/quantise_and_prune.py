# %% [markdown]
# # Quantise and prune: what it buys on three GPUs
#
# Two ways to a smaller model: fewer bits per weight, or fewer weights. Both shorten the bytes that a decode step reads. Which
# of them helps, and how much, depends on what else the step reads and on whether the chip multiplies in the narrower format
# at all.

# %%
import roofline
from roofline.cli.output import table
from roofline.edits import apply, dtype, kv_dtype, prune_depth, prune_width
from roofline.plots import breakdown_plot, lines_plot, memory_plot
from roofline.training import distillation

GIB = 2**30
base = roofline.load_model("llama-3.1-8b")
gpus = {name: roofline.load_accelerator(name) for name in ("l4", "a100-sxm-80gb", "h100-sxm")}
for name, gpu in gpus.items():
    rates = ", ".join(f"{unit} {float(gpu.rate(unit)) / 1e12:,.0f}" for unit in ("bf16", "fp8", "int8") if unit in gpu.compute)
    print(f"{name:14} {float(gpu.bandwidth.value) / 1e12:.2f} TB/s, {float(gpu.capacity.value) / GIB:.1f} GiB, TFLOP/s: {rates}")

# %% [markdown]
# ## The variants
#
# *Minitron* (arXiv 2408.11796) prunes Llama 3.1 8B to half its size in two ways: **width**, a hidden size of 3,072 and a
# feed-forward layer of 9,216 in all 32 layers, or **depth**, 16 layers as they are. As edits they reproduce the published
# parameter counts. int4 has one 16-bit scale per 128 weights, so its weights cost 4.125 bits; norms, embedding and head stay
# as they are.

# %%
variants = {
    "bf16": base,
    "fp8": apply(base, [dtype("fp8")]),
    "int4": apply(base, [dtype("int4-g128")]),
    "width 4B": apply(base, [prune_width("hidden=3072,ffn=9216")]),
    "depth 4B": apply(base, [prune_depth(16)]),
    "depth 4B, int4": apply(base, [prune_depth(16), dtype("int4-g128")]),
    "int4, fp8 cache": apply(base, [dtype("int4-g128"), kv_dtype("fp8")]),
}
context = 4096
print(
    table(
        ["variant", "parameters", "weights GiB", "cache MiB per sequence"],
        [
            [
                name,
                f"{m.params / 1e9:.2f} B",
                f"{float(m.weight_bytes) / GIB:.2f}",
                f"{float(m.state_bytes(context)) / 2**20:,.0f}",
            ]
            for name, m in variants.items()
        ],
    )
)

# %% [markdown]
# ## One user
#
# Alone, a step reads the weights and little else. There int4 and pruning do what they promise, on every chip alike.

# %%
deployments = {(name, chip): roofline.Deployment(model, gpu) for name, model in variants.items() for chip, gpu in gpus.items()}
alone = {key: deployment.decode(1, context) for key, deployment in deployments.items()}
rows = [[name, *(f"{1 / alone[name, chip].bound_s:,.0f}" for chip in gpus)] for name in variants]
print(table(["tok/s, batch 1", *gpus], rows))

# %% [markdown]
# ## As many users as fit
#
# With a full memory the cache is most of what a step reads, and the gain from small weights shrinks. What remains is the room
# they leave, which is worth much on the small card and little on the large ones. Halving the layers halves the cache as well;
# narrowing them does not touch it. An fp8 cache does more here than all of int4.

# %%
full = {}
for key, deployment in deployments.items():
    most = deployment.largest_batch(context).size
    full[key] = (most, deployment.decode(most, context).output_tok_per_s if most else 0.0)
rows = [[name, *(f"{full[name, chip][1]:,.0f} ({full[name, chip][0]})" for chip in gpus)] for name in variants]
print(table(["tok/s (largest batch)", *gpus], rows))

# %%
shown = ("bf16", "int4", "width 4B", "depth 4B")
memory_plot({name: deployments[name, "l4"] for name in shown}, 16, context, title="16 sequences of 4,096 tokens on an L4")

# %% [markdown]
# ## The prompt
#
# A prefill is bound by arithmetic. int4 weights are expanded to 16 bits and multiplied there, so they gain nothing; fp8
# doubles the rate where the chip has fp8 units, which the A100 has not. Pruning removes work, everywhere.

# %%
prefill = {key: deployment.prefill(1, 2048) for key, deployment in deployments.items()}
rows = [[name, *(f"{prefill[name, chip].bound_s * 1e3:,.1f}" for chip in gpus)] for name in variants]
print(table(["prefill of 2,048 tokens, ms", *gpus], rows))

# %% [markdown]
# From one user to a full card, the advantage of int4 over bf16 melts from three to hardly more than one.

# %%
batches = [2**power for power in range(8)]
gain = {
    name: [
        (b, deployments["bf16", "h100-sxm"].decode(b, context).bound_s / deployments[name, "h100-sxm"].decode(b, context).bound_s)
        for b in batches
    ]
    for name in ("fp8", "int4", "width 4B", "depth 4B", "int4, fp8 cache")
}
lines_plot(
    gain, x="Batch [sequences]", y="Speed-up over bf16", title="What a smaller model buys on an H100, by batch", x_scale="log2",
    level=(1.0, "bf16"), note=f"decode at context {context:,}, bounds",
)  # fmt: skip

# %%
breakdown_plot(
    {name: deployments[name, "h100-sxm"] for name in shown},
    [64],
    context,
    engine="none",
    title="Where a step of 64 sequences goes",
)

# %% [markdown]
# ## What it costs
#
# Quantising after training costs next to nothing. A pruned model must be healed: distilling from its parent with 94 billion
# tokens takes a training step of the student and a forward pass of the teacher for each of them. Against training the small
# model on the parent's 15 trillion tokens that is a bargain.

# %%
healed = distillation(variants["width 4B"], base, 94 * 10**9, 15 * 10**12, 8192)
print(f"distilling {float(healed.distill_flop):.2e} FLOP, training from scratch {float(healed.scratch_flop):.2e} FLOP")
print(f"distilling takes {healed.saving:.0f} times less")

# %% [markdown]
# ## The headline numbers

# %%
assert round(variants["width 4B"].params / 1e9, 2) == 4.51
assert round(variants["depth 4B"].params / 1e9, 2) == 4.54


def faster(name, chip, steps):
    return steps["bf16", chip].bound_s / steps[name, chip].bound_s


for chip in gpus:
    assert 2.8 < faster("int4", chip, alone) < 3.2
    assert 1.7 < faster("width 4B", chip, alone) < 1.9
    assert abs(faster("int4", chip, prefill) - 1) < 1e-9
    assert 1.8 < faster("width 4B", chip, prefill) < 2.0
assert abs(faster("fp8", "a100-sxm-80gb", prefill) - 1) < 1e-9
assert faster("fp8", "h100-sxm", prefill) > 1.9
assert full["int4", "h100-sxm"][1] / full["bf16", "h100-sxm"][1] < 1.2
assert full["int4", "l4"][1] / full["bf16", "l4"][1] > 2
assert full["depth 4B", "h100-sxm"][1] / full["bf16", "h100-sxm"][1] > 2
assert variants["width 4B"].state_bytes(context) == base.state_bytes(context) == 2 * variants["depth 4B"].state_bytes(context)
assert healed.saving > 80
print("int4: 3 x for one user, 1.15 x for a full H100, nothing for the prompt")
