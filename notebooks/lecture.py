# %% [markdown]
# # Inference, formula by formula
#
# The argument of CS336's inference lecture, computed instead of copied: every formula below is the one that the toolkit
# itself uses, read with symbols; every number is the same formula read with integers. The last cell checks the lecture's own
# table to twelve digits.

# %%
import roofline
from roofline.cli.output import table
from roofline.edits import apply, kv_heads
from roofline.formulas import formula
from roofline.plots import kernel_points, latency_plot, lines_plot, roofline_plot, throughput_plot
from roofline.symbols import symbols

h100 = roofline.load_accelerator("h100-sxm")

# %% [markdown]
# ## One matrix multiplication
#
# $x[B, D]\,W[D, F]$ in bf16 does $2BDF$ FLOP and moves each of its three matrices once.

# %%
linear = formula("linear", values={"T": 1})
print("FLOP ", linear.flops)
print("bytes", linear.bytes.xreplace({symbols("w")[0]: 2}))
linear.intensity

# %% [markdown]
# When the batch is small beside $D$ and $F$, only it survives. So the batch alone decides whether the multiplication is bound
# by arithmetic: it must exceed the accelerator's own ratio of FLOP/s to bytes/s, its *ridge*.

# %%
for case, limit in linear.limits:
    print(f"{case}: intensity -> {limit}")
ridge = h100.ridge()
print(f"ridge of the H100: 989e12 / 3.35e12 = {ridge:.1f} FLOP/B")

# %% [markdown]
# ## The two halves of a layer
#
# The feed-forward network is three such multiplications, so its intensity grows with every token that runs through it, $BT$.

# %%
mlp = formula("mlp")
print(mlp.limits)
mlp.intensity

# %% [markdown]
# Attention is different. Each sequence has keys and values of its own: the batch cancels.

# %%
attention = formula("attention", "lecture")
attention.intensity

# %% [markdown]
# With $S = T$, a prefill, that is $T/2$: plenty. With $T = 1$, generation, it is $S/(S+1)$: **below one, whatever the batch,
# the context or the model**. No batch size rescues attention in a decode step; only a smaller cache does.

# %%
T, S = symbols("T S")
prefill_intensity = attention.intensity.xreplace({S: T}).simplify()
decode_intensity = attention.intensity.xreplace({T: 1})
print("prefill:   ", prefill_intensity)
print("generation:", decode_intensity)

# %% [markdown]
# The roofline of Llama 2 13B shows both phases at once. Filled marks are a prefill of 1,024 tokens, hollow ones a decode step
# of 64 sequences.

# %%
llama = roofline.load_model("llama-2-13b")
exact = roofline.Deployment(llama, h100)
points = [
    *kernel_points(exact, 64, 1024, engine="none"),
    *kernel_points(exact, 1, 0, phase="prefill", new_tokens=1024, engine="none"),
]
roofline_plot(
    h100, points, reached=None, title="Llama 2 13B on an H100", note="prefill of 1,024 tokens; decode of 64 sequences at 1,024"
)

# %% [markdown]
# ## Why there is a cache
#
# Without one, each new token re-runs the whole sequence: a generation of $T$ tokens costs $O(T^3)$ in attention and $O(T^2)$
# in everything else. With one, each step runs one token.

# %%
lengths = (64, 128, 256, 512, 1024)
work = {
    name: [(n, exact.generate(1, 1, n, cached=cached).cost.matrix_flops / 1e12) for n in lengths]
    for name, cached in (("naive", False), ("with a KV cache", True))
}
saving = work["naive"][-1][1] / work["with a KV cache"][-1][1]
print(f"1,024 tokens: the cache saves a factor of {saving:,.0f} in arithmetic")
lines_plot(work, x="Tokens generated", y="Arithmetic [TFLOP]", title="What a KV cache saves", x_scale="log2", y_scale="log10")

# %% [markdown]
# ## Latency against throughput
#
# Generation is bound by memory, so a step takes the bytes of parameters and cache over the bandwidth. The lecture counts
# nothing else; `convention="lecture"` does the same. Read with a symbol for the batch, the latency is a line.

# %%
(B,) = symbols("B")
lecture = roofline.Deployment(llama, h100, "lecture")
step = lecture.decode(B, 1024)
print("memory [B]:", step.memory.total_bytes)
print("latency [s]:", step.bound_s.evalf(6))
print("throughput [tok/s]:", (B / step.bound_s).simplify().evalf(6))

# %% [markdown]
# The intercept is the weights, which all sequences share; the slope is one sequence's cache. Latency therefore grows without
# bound, and throughput saturates at one over the slope. Reducing the key-value heads from 40 to 8 divides the slope by five.

# %%
gqa = roofline.Deployment(apply(llama, [kv_heads(8)]), h100, "lecture")
rows, found = [], {}
for name, deployment in (("MHA", lecture), ("GQA", gqa)):
    for batch in (1, 64, 256):
        step = deployment.decode(batch, 1024)
        found[name, batch] = (step.memory.total_bytes, step.bound_s, step.output_tok_per_s)
        rows.append(
            [name, batch, f"{step.memory.total_bytes / 1e9:.1f}", f"{step.bound_s * 1e3:.2f}", f"{step.output_tok_per_s:,.0f}",
             "yes" if step.memory.fits else "no"]
        )  # fmt: skip
print(table(["heads", "batch", "memory GB", "latency ms", "tok/s", "fits"], rows))

# %%
cases = {"MHA, 40 KV heads": lecture, "GQA, 8 KV heads": gqa}
batches = [2**power for power in range(10)]
latency_plot(cases, batches, 1024, title="Llama 2 13B on an H100, the lecture's convention")

# %%
throughput_plot(cases, batches, 1024, title="Llama 2 13B on an H100, the lecture's convention")

# %% [markdown]
# ## What the convention leaves out
#
# Counting every kernel changes little at batch 1 and more at large batches: activations move too, and one row of the
# embedding is read instead of all of it. The bound and the time without any overlap bracket what a kernel can do.

# %%
for batch in (1, 64, 256):
    counted, simple = exact.decode(batch, 1024), lecture.decode(batch, 1024)
    print(
        f"batch {batch:3}: lecture {simple.bound_s * 1e3:6.2f} ms; counted {counted.bound_s * 1e3:6.2f} "
        f"to {counted.serial_s * 1e3:6.2f} ms, bound by {counted.bound_by}"
    )

# %% [markdown]
# ## The headline numbers

# %%
printed = {
    ("MHA", 1): (26869760000, 0.00802082388059702, 124.675471608232),
    ("MHA", 64): (79717990400, 0.0237964150447761, 2689.48074235449),
    ("MHA", 256): (240779264000, 0.0718744071641791, 3561.76850843767),
    ("GQA", 1): (22843228160, 0.00681887407761194, 146.651776908925),
    ("GQA", 64): (33412874240, 0.00997399231044776, 6416.68832378785),
    ("GQA", 256): (65625128960, 0.0195895907343284, 13068.1647958776),
}
for key, (memory, latency, throughput) in printed.items():
    assert found[key][0] == memory
    assert abs(found[key][1] / latency - 1) < 1e-12
    assert abs(found[key][2] / throughput - 1) < 1e-12
assert round(ridge) == 295
assert str(linear.limits[0][1]) == "B"
assert str(prefill_intensity) == "T/2"
assert str(decode_intensity) == "S/(S + 1)"
assert 250 < saving < 600
print("all as the lecture prints them")
