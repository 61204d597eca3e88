# %% [markdown]
# # Bring your own model and GPU
#
# The catalogue knows two hundred models and forty accelerators, but the question is usually about one that is not there: a
# model still being designed, a chip known from a slide. Both are a text file. This notebook writes one of each, and asks of
# them what one would ask of the others.

# %%
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import roofline
from roofline.cli.output import table
from roofline.edits import apply, dtype, kv_dtype, mla_rank, window
from roofline.parallel.mesh import Mesh
from roofline.planner.prices import rent
from roofline.plots import breakdown_plot, kernel_points, lines_plot, roofline_plot
from roofline.sharded import ShardedDeployment
from roofline.symbols import symbols

GIB = 2**30
folder = Path(tempfile.mkdtemp(), "our-moe")
folder.mkdir()

# %% [markdown]
# ## A model
#
# A `config.json` as Hugging Face's transformers reads it. `model_type` says which architecture the other keys describe; ours
# is a mixture of 64 experts in the manner of Qwen3. What the file leaves out, and the tool had to assume, is said.

# %%
config = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1024, "intermediate_size": 6144,
    "vocab_size": 65536, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
(folder / "config.json").write_text(json.dumps(config))
model = roofline.load_model(folder / "config.json")
print(f"{model.name}: {model.params / 1e9:.2f} B parameters, {model.active_params / 1e9:.2f} B active")
print(f"{float(model.weight_bytes) / GIB:.1f} GiB of weights, {model.kv_bytes_per_token / 1024:.0f} KiB of cache per token")
print("assumes:", *model.assumes)

# %% [markdown]
# A mistake is one line that names the key. Nothing is guessed that cannot be.

# %%
mistakes = (
    {"num_key_value_heads": 5}, {"num_hidden_layers": None}, {"num_experts": "64"}, {"num_experts_per_tok": 100},
    {"torch_dtype": "float8"}, {"model_type": "our_gpt"},
)  # fmt: skip
refused = []
for mistake in mistakes:
    try:
        roofline.load_model({key: value for key, value in {**config, **mistake}.items() if value is not None})
    except roofline.RooflineError as error:
        refused.append(error)
        print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## A GPU
#
# A chip on a slide: half the arithmetic of an H100, less bandwidth, more and cheaper memory. Every number carries its unit, its
# kind and its source, be it a wish; a file without one is refused. Prices are optional.

# %%
card = """\
id = "our-card"
name = "Our inference card"
vendor = "us"
kind = "gpu"
architecture = "paper"

[compute]
bf16   = { value = 500, unit = "TFLOP/s", kind = "datasheet", source = "slide 7" }
fp8    = { value = 1000, unit = "TFLOP/s", kind = "datasheet", source = "slide 7" }
vector = { value = 30, unit = "TFLOP/s", kind = "derived", source = "the H100's, halved" }

[memory]
nominal   = { value = 128, unit = "GB", kind = "datasheet", source = "slide 8" }
bandwidth = { value = 1.6, unit = "TB/s", kind = "datasheet", source = "slide 8" }

[links.pcie]
bandwidth = { value = 64, unit = "GB/s", kind = "datasheet", source = "PCIe 5.0 x16, one way" }

[node]
accelerators = { value = 8, unit = "1", kind = "datasheet", source = "slide 9" }
link         = "pcie"

[[price]]
usd_per_hour = { value = 0.9, unit = "USD/h", kind = "derived", source = "what we would ask" }
"""
path = folder.parent / "our-card.toml"
path.write_text(card)
ours = roofline.load_accelerator(path)
print(f"{ours.name}: ridge {ours.ridge():.0f} FLOP/B in bf16, {ours.ridge('fp8'):.0f} in fp8")
path.write_text(card.replace(', source = "slide 7"', "", 1))
try:
    roofline.load_accelerator(path)
except roofline.InputError as error:
    refused.append(error)
    print("InputError:", error)

# %% [markdown]
# ## One on the other
#
# The same question to our card and to two that exist: how many conversations of 16Ki tokens fit, how fast is each, and what do
# a million tokens cost. For a chip that nobody has measured every time is a bound, so bounds are compared with bounds.

# %%
context = 16 * 1024
gpus = [ours, roofline.load_accelerator("h100-sxm"), roofline.load_accelerator("h200-sxm")]
rows, cost = [], {}
for gpu in gpus:
    deployment = roofline.Deployment(model, gpu)
    most = deployment.largest_batch(context).size
    step, price = deployment.decode(most, context), rent(gpu)
    cost[gpu.id] = price.usd / 3600 / step.output_tok_per_s * 1e6
    prompt = deployment.prefill(1, context)
    rows.append(
        [gpu.id, most, f"{step.bound_s * 1e3:.1f}", f"{step.output_tok_per_s:,.0f}", step.bound_by, f"{prompt.bound_s:.2f}",
         f"{cost[gpu.id]:.3f}"]
    )  # fmt: skip
print(table(["GPU", "most at 16Ki", "TPOT ms", "tok/s", "bound by", "TTFT s", "USD/M output"], rows))

# %%
deployment = roofline.Deployment(model, ours)
points = [
    *kernel_points(deployment, 64, context, engine="none"),
    *kernel_points(deployment, 1, 0, phase="prefill", new_tokens=4096, engine="none"),
]
roofline_plot(ours, points, reached=None, title="Our model on our card", note="prefill of 4,096 tokens; 64 sequences at 16Ki")

# %% [markdown]
# ## What if
#
# Model, chip and formats are values; changing one gives another. First the model, by edits: each is one idea, and they compose.

# %%
ideas = {
    "as it is": [],
    "fp8 weights": [dtype("fp8")],
    "fp8 cache": [kv_dtype("fp8")],
    "window of 4Ki": [window(4096)],
    "MLA, rank 512": [mla_rank(512)],
    "fp8 weights and cache": [dtype("fp8"), kv_dtype("fp8")],
}
edited = {name: roofline.Deployment(apply(model, edits), ours) for name, edits in ideas.items()}
speed = {}
for name, one in edited.items():
    most = one.largest_batch(context).size
    speed[name] = one.decode(most, context).output_tok_per_s
    alone = one.decode(1, context)
    print(f"{name:22} {most:4} fit, {speed[name]:6,.0f} tok/s together, {1 / alone.bound_s:4.0f} tok/s alone")

# %%
shown = ("as it is", "fp8 cache", "MLA, rank 512", "fp8 weights and cache")
breakdown_plot({name: edited[name] for name in shown}, [32], context, engine="none", title="Where a step of 32 sequences goes")

# %% [markdown]
# Then the chip. What would more bandwidth buy, and what more arithmetic? `dataclasses.replace` on the accelerator is enough.


# %%
def faster(bandwidth=1.0, compute=1.0):
    """Our card with so many times the bandwidth and the arithmetic."""
    rates = {unit: replace(rate, value=rate.value * compute) for unit, rate in ours.compute.items()}
    return replace(ours, bandwidth=replace(ours.bandwidth, value=ours.bandwidth.value * bandwidth), compute=rates)


factors = (0.5, 1, 2, 4)
base = deployment.decode(64, context).bound_s
first = deployment.prefill(1, context).bound_s
gain = {}
for name in ("bandwidth", "compute"):
    chips = {f: roofline.Deployment(model, faster(**{name: f})) for f in factors}
    gain[f"{name}, decode"] = [(f, base / chip.decode(64, context).bound_s) for f, chip in chips.items()]
    gain[f"{name}, prefill"] = [(f, first / chip.prefill(1, context).bound_s) for f, chip in chips.items()]
lines_plot(
    gain, x="Times as much of it", y="Speed-up", x_scale="log2", title="What a better chip buys our model",
    note="decode: 64 sequences at 16Ki; prefill: one prompt of 16Ki; bounds",
)  # fmt: skip

# %% [markdown]
# And several of them. Eight cards without a fast link: is it worth cutting the model in two, four or eight?

# %%
rows, meshes = [], {}
for ranks in (1, 2, 4, 8):
    mesh = Mesh(tp=ranks) if ranks <= 4 else Mesh(tp=4, pp=2)
    cut = ShardedDeployment(model, ours, mesh=mesh)
    step = cut.decode(64, context)
    meshes[ranks] = step
    rows.append([ranks, mesh.flags or "-", f"{step.bound_s * 1e3:.2f}", f"{step.serial_s * 1e3:.2f}", step.bound_by])
print(table(["cards", "mesh", "bound ms", "without overlap ms", "bound by"], rows))

# %% [markdown]
# ## The formula
#
# With symbols for sizes the same model answers in algebra: a decode step by batch $B$ and context $S$.

# %%
B, S = symbols("B S")
step = model.cost(roofline.Work(B, 1, S, all_logits=True))
print("FLOP: ", step.matrix_flops)
print("cache:", step.read["state"], "B")
step.read["weights"].evalf(4)

# %% [markdown]
# The weights that a step reads are those of the experts that somebody's token chose: a power of the batch, because each of $B$
# tokens misses a given expert with probability $1 - 6/64$.

# %%
share = [(batch, float(step.read["weights"].xreplace({B: batch})) / float(model.weight_bytes)) for batch in (1, 4, 16, 64)]
print(", ".join(f"batch {batch}: {part:.0%} of the weights" for batch, part in share))

# %% [markdown]
# ## A checkpoint
#
# Once there are weights, the headers of the files say what was really stored, and the folder is compared with its config. A
# safetensors file is a header in JSON and then bytes; here is a small one whose author added a bias that the config does not
# mention. Headers are read by the library of that name (the extra `checkpoints`); without it nothing is compared, and the answer
# says so, with the command that installs it.

# %%
small = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}  # fmt: skip
shapes = {
    "model.embed_tokens": [256, 64], "model.layers.0.self_attn.q_proj": [64, 64], "model.layers.0.self_attn.k_proj": [32, 64],
    "model.layers.0.self_attn.v_proj": [32, 64], "model.layers.0.self_attn.o_proj": [64, 64],
    "model.layers.0.mlp.gate_proj": [128, 64], "model.layers.0.mlp.up_proj": [128, 64],
    "model.layers.0.mlp.down_proj": [64, 128], "model.layers.0.input_layernorm": [64],
    "model.layers.0.post_attention_layernorm": [64], "model.norm": [64],
}  # fmt: skip


def checkpoint(name, tensors):
    """A folder with a config and zeros."""
    place, header, end = folder.parent / name, {}, 0
    place.mkdir(exist_ok=True)
    for tensor, shape in tensors.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (place / "config.json").write_text(json.dumps(small))
    (place / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return roofline.load_model(place).assumes[-1]


weights = {f"{name}.weight": shape for name, shape in shapes.items()}
notes = [
    checkpoint("as-described", weights),
    checkpoint("with-a-bias", {**weights, "model.layers.0.self_attn.q_proj.bias": [64]}),
]
print(*notes, sep="\n")

# %% [markdown]
# The command line takes the same files: `roofline what-if our-moe/config.json --gpu our-card.toml --batch 1,64 --context 16Ki`,
# and so do `fit`, `plan`, `simulate` and `plot`. When the chip exists, `roofline bench` and `roofline validate` on it turn bounds
# into measurements.
#
# ## The headline numbers

# %%
L, K, H, D, F, V, E = 32, 4, 128, 2048, 1024, 65536, 64
attention = D * 32 * H + 2 * D * K * H + 32 * H * D + 2 * H
assert model.params == L * (attention + E * 3 * D * F + D * E + 2 * D) + 2 * V * D + D
assert model.kv_bytes_per_token == 2 * 2 * K * H * L
assert len(refused) == len(mistakes) + 1
assert ours.ridge() == 500e12 / 1.6e12
assert cost["our-card"] < min(cost["h100-sxm"], cost["h200-sxm"])
assert speed["fp8 weights and cache"] > max(speed["fp8 weights"], speed["fp8 cache"]) > speed["as it is"]
assert dict(gain["bandwidth, decode"])[2] > 1.8
assert abs(dict(gain["compute, decode"])[2] - 1) < 0.01
assert dict(gain["compute, prefill"])[2] > 1.5
assert abs(dict(gain["bandwidth, prefill"])[2] - 1) < 0.01
assert meshes[2].bound_s < meshes[1].bound_s
compared = not any("were not compared" in note for note in notes)  # without the extra checkpoints they are not
assert notes[0].endswith("as the config says") or not compared
assert "DIFFER" in notes[1] or not compared
assert "53,504 parameters where the config describes 53,440" in notes[1] or not compared
print(
    f"{model.params / 1e9:.1f} B parameters; our card {cost['our-card']:.3f}, H100 {cost['h100-sxm']:.3f} USD per million tokens"
)
