# %% [markdown]
# # Capacity planning
#
# Two services on one model, Llama 3.1 70B. A **chat**: ten questions a second, each with some history. An **agent** that
# programs: long sessions in which every step sends everything that was read and written before. Both have a service-level
# objective (SLO), and both end in a command that can be pasted and a price per million tokens.

# %%
import roofline
from roofline.allocation import Settings
from roofline.cli.output import table
from roofline.engines.documented import load_server
from roofline.engines.profile import load_engine
from roofline.planner.ceilings import ceilings
from roofline.planner.demand import demand
from roofline.planner.launch import launches
from roofline.planner.search import frontier
from roofline.planner.sensitivity import label, sensitivity
from roofline.planner.solve import Question, solve
from roofline.plots import lines_plot
from roofline.serving.lengths import SHAPES, parse_length
from roofline.serving.metrics import Objective, Result
from roofline.serving.server import Options, make_server
from roofline.serving.workload import synthetic

engine, most = load_engine("vllm"), 32
gpus = [roofline.load_accelerator(name) for name in ("h100-sxm", "h200-sxm")]


def usd_per_mtok(plan, tokens_per_s):
    return plan.usd_per_hour / 3600 / tokens_per_s * 1e6


# %% [markdown]
# ## The chat
#
# Ten requests a second arrive at random, 1,500 tokens of prompt and 300 of answer. The first token must come within a second
# for 99 of 100, and then one every 30 ms, which is faster than anyone reads. The search sizes every layout, format, batch and
# token budget in closed form, and hands the cheapest of each kind to the simulator.

# %%
chat, slo = demand(isl=1500, osl=300, rate=10.0), Objective(ttft_s=1.0, tpot_s=0.03)
answer = solve(Question("llama-3.1-70b", chat, slo, gpus, most=most, disaggregation=False))
found, chosen = answer.found, answer.chosen
print(f"{found.tried:,} deployments sized, {len(found.plans)} meet the SLO in closed form; confirmed by the simulator:")
rows = [
    [label(c.plan), c.plan.gpus, f"{c.verdict.ttft_high_s * 1e3:.0f}", f"{c.verdict.tpot_s * 1e3:.1f}",
     f"{c.plan.usd_per_hour:.2f}", f"{usd_per_mtok(c.plan, chat.rate * chat.osl):.2f}"]
    for c in chosen.confirmed
]  # fmt: skip
print(table(["deployment", "GPUs", "TTFT p99 ms", "TPOT ms", "USD/h", "USD/M output"], rows))

# %% [markdown]
# The objective is a point on a trade-off. To the left many users share a step, and a GPU makes many tokens; to the right few
# users wait for less. Where the dashed line, the load of each GPU in the plan, meets a line is the fastest that this load can
# be answered at this price.

# %%
trade = {
    gpu.id: [(point.user, point.gpu) for point in frontier([p for p in found.points if p.plan.setup.accelerator.id == gpu.id])]
    for gpu in gpus
}
lines_plot(
    trade, x="Tokens per second of one user", y="Output tokens per second of one GPU", y_scale="log10", x_scale="log2",
    title="Llama 3.1 70B, 1,500 + 300 tokens: what speed costs", note="closed form, all layouts and formats",
    level=(chat.rate * chat.osl / chosen.confirmed[0].plan.gpus, "the plan's load per GPU"),
)  # fmt: skip

# %% [markdown]
# What binds, in users at once if only that limit held; and which assumption, moved within its range, would make another
# deployment the cheapest. A choice that flips on a small move is a tie: take the one that is easier to run.

# %%
best = chosen.confirmed[0].plan
print(", ".join(f"{one.name} {one.users:,}" for one in ceilings(best, chat, slo) if one.users is not None))
for flip in sensitivity(found.plans, chat, slo, answer.rents, most, {}, chosen):
    change = "no change"
    if flip.flips_at is not None:
        change = f"{'below' if flip.flips_at < flip.nominal else 'above'} {flip.flips_at:.4g}: {flip.to}"
    print(f"{flip.assumption} ({flip.low:g} to {flip.high:g}): {change}")

# %% [markdown]
# ## What the plan assumed
#
# Every request had the same lengths. People are not like that, so let the simulator draw lengths with long tails and the same
# means, and serve them request by request on the plan, and on one instance more.


# %%
def serve(plan, drawn, instances, objective, prefix_cache=False):
    """What a plan's instances make of drawn requests."""
    settings = Settings(max_model_len=65536, batched_tokens=plan.budget, sequences=plan.batch)
    options = Options(replicas=instances, prefix_cache=prefix_cache)
    server = make_server(plan.setup.deployment, drawn, engine=engine, settings=settings, options=options)
    return Result(server.serve(drawn), objective, server.gpus)


def row(name, result):
    figures = result.to_dict()
    share = f"{figures['prefix_hit_share']:.0%}"
    tail = f"{figures[f'ttft_p{result.objective.percentile:g}_s']:.2f}"
    return [name, result.gpus, tail, f"{figures['tpot_mean_s'] * 1e3:.1f}", share, "yes" if result.meets else "no"]


people = synthetic(
    800, parse_length("lognormal:1500:0.8", "isl"), parse_length("lognormal:300:0.6", "osl"), rate=chat.rate, seed=1,
    longest=16384,
)  # fmt: skip
real = {n: serve(best, people, n, slo) for n in (best.instances, best.instances + 1)}
headers = ["served by", "GPUs", "TTFT p99 s", "TPOT ms", "of prompts cached", "meets"]
print(table(headers, [row(f"{n} instances", result) for n, result in real.items()]))

# %% [markdown]
# The tail of the prompts is the tail of the first tokens. Whether the margin is worth an instance is a question of what a
# slow answer costs; the command is the same, started once more.

# %%
(chat_launch,) = launches(best, answer.launch_model, 16384, answer.stored)
chat_usd = usd_per_mtok(best, chat.rate * chat.osl)
print(f"# {chat_launch.instances} of these behind a load balancer, {chat_usd:.2f} USD per million output tokens")
print(chat_launch.command)

# %% [markdown]
# ## The agent
#
# A session begins with 6,000 tokens of instructions and tools. Each of its steps appends what a tool returned, writes a few
# hundred tokens, and calls the next tool, which takes five seconds; lengths as TraceLab measured them on coding assistants.
# A new session starts every seven seconds. The first token of a step may take three seconds in 95 of 100, each further one
# 40 ms. A mean prompt has tens of thousands of tokens, nearly all of which the server has seen a moment ago.

# %%
steps, sessions_per_s, limits = SHAPES["coding-step"], 0.15, Objective(ttft_s=3.0, tpot_s=0.04, percentile=95.0)


def sessions(rate, number=40):
    return synthetic(
        12 * number, steps.prompt, steps.output, rate=rate, turns=12, think_s=5.0, prefix=6000, seed=1, longest=65536
    )  # fmt: skip


drawn = sessions(sessions_per_s)
per_session, prompt, output = len(drawn) / 40, int(drawn.prompt.mean()), int(drawn.output.mean())
print(f"{per_session:.1f} steps a session, {prompt:,} tokens of prompt and {output} of output a step")

# %% [markdown]
# The planner knows no prefix caches: it takes these prompts as new, each time. That is the answer for a server without one.

# %%
agent = demand(isl=prompt, osl=output, rate=sessions_per_s * per_session)
cold = solve(Question("llama-3.1-70b", agent, limits, gpus, most=most, disaggregation=False, shown=1, requests=400))
cold_plan = cold.chosen.confirmed[0].plan
print(f"without a prefix cache: {label(cold_plan)}, {cold_plan.gpus} GPUs, {cold_plan.usd_per_hour:.2f} USD/h")

# %% [markdown]
# The simulator has real block tables. One instance that keeps prefixes, of the sizes that the search came upon until one is
# enough, against the cold plan without:

# %%
by_size = {one.setup.gpus: one for one in reversed(cold.found.plans) if one.setup.accelerator == cold_plan.setup.accelerator}
kept = {}
for size, one in sorted(by_size.items()):
    kept[size] = serve(one, drawn, 1, limits, prefix_cache=True)
    if kept[size].meets:
        break
lost = serve(cold_plan, drawn, cold_plan.instances, limits)
rows = [row(f"{label(by_size[size].with_instances(1))}, prefixes kept", result) for size, result in kept.items()]
print(
    table(
        ["served by", "GPUs", "TTFT p95 s", "TPOT ms", "cached", "meets"], [*rows, row(f"{label(cold_plan)}, nothing kept", lost)]
    )
)

# %% [markdown]
# How many agents can it take?

# %%
enough = max(kept)
agent_plan = by_size[enough].with_instances(1)
crowds = (10, 30, 60)
tails = {
    name: [(n, serve(agent_plan, sessions(n / 100, n), 1, limits, keeps).to_dict()["ttft_p95_s"]) for n in crowds]
    for name, keeps in (("prefixes kept", True), ("nothing kept", False))
}
lines_plot(
    tails, x="Agents that start within 100 seconds", y="TTFT, 95th percentile [s]", y_scale="log10",
    title="How many agents one instance takes",
    level=(limits.ttft_s, "the SLO"), note=f"{label(agent_plan)}; sessions of up to 12 steps",
)  # fmt: skip

# %%
(agent_launch,) = launches(agent_plan, answer.launch_model, 65536, answer.stored)
words = (*agent_launch.words, "--enable-prefix-caching")
load_server("vllm").check(words)
agent_usd = usd_per_mtok(agent_plan, agent.rate * agent.osl)
print(f"# {agent_usd:.2f} USD per million output tokens, {agent_usd * agent.osl / agent.length:.3f} per million of all")
print(" ".join(words))

# %% [markdown]
# An agent's output token costs more than a chat's, although nearly all of its prompts are free: what is left is long contexts
# to read in every decode step, and small batches. Without the cache it costs several times that.
#
# ## The headline numbers

# %%
verdict = chosen.confirmed[0].verdict
assert verdict.ttft_high_s <= slo.ttft_s
assert verdict.tpot_s <= slo.tpot_s
assert best.gpus <= 16
assert load_server("vllm").check(chat_launch.words)["max_num_seqs"] == best.batch
tail = {n: result.to_dict()["ttft_p99_s"] for n, result in real.items()}
assert tail[best.instances] > verdict.ttft_high_s
assert tail[best.instances + 1] < tail[best.instances]
assert real[best.instances + 1].meets
assert kept[enough].to_dict()["prefix_hit_share"] > 0.8
assert cold_plan.gpus >= 2 * agent_plan.gpus
assert kept[enough].meets
assert all(dict(tails["nothing kept"])[n] > 3 * dict(tails["prefixes kept"])[n] for n in crowds)
assert 0.5 < chat_usd < 5
assert agent_usd > chat_usd
print(f"chat {chat_usd:.2f}, agent {agent_usd:.2f} USD per million output tokens;", end=" ")
print(f"agents without a prefix cache: {cold_plan.gpus} GPUs instead of {agent_plan.gpus}")
