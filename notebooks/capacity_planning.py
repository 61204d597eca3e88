# %% [markdown]
# # Capacity planning
#
# Two services on one model, Llama 3.1 70B. A **chat**: ten questions a second, each with some history. An **agent** that
# programs: long sessions in which every step sends everything that was read and written before. Both have a service-level
# objective (SLO), and both end in a command that can be pasted and a price per million tokens.

# %%
from dataclasses import replace

import roofline
from roofline.cli.output import table
from roofline.engines.documented import load_server
from roofline.planner.ceilings import ceilings
from roofline.planner.demand import demand
from roofline.planner.launch import launches
from roofline.planner.search import frontier
from roofline.planner.sensitivity import label, sensitivity
from roofline.planner.solve import Question, solve
from roofline.planner.verify import Replay
from roofline.plots import lines_plot
from roofline.serving.lengths import SHAPES, parse_length
from roofline.serving.metrics import Objective

most = 32
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
answer = solve(Question("llama-3.1-70b", chat, slo, gpus, most=most, disaggregation=False, requests=700))
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
# deployment the cheapest, by the closed form. A choice that flips on a small move is a tie: take the one that is easier to run.

# %%
best = chosen.confirmed[0].plan
print(", ".join(f"{one.name} {one.users:,}" for one in ceilings(best, chat, slo) if one.users is not None))
for flip in sensitivity(found.plans, chat, slo, answer.rents, most, {}):
    change = "no change"
    if flip.flips_at is not None:
        change = f"{'below' if flip.flips_at < flip.nominal else 'above'} {flip.flips_at:.4g}: {flip.to}"
    print(f"{flip.assumption} ({flip.low:g} to {flip.high:g}): {change}")

# %% [markdown]
# ## What the plan assumed
#
# Every request had the same lengths. People are not like that. The same question for lengths with long tails and the same means:
# the closed form takes their mean and spread, the simulator draws them.

# %%
people = replace(chat, prompt=parse_length("lognormal:1500:0.8", "isl"), output=parse_length("lognormal:300:0.6", "osl"))
drawn = solve(Question("llama-3.1-70b", people, slo, gpus, most=most, disaggregation=False, shown=1))
crowd = drawn.chosen.confirmed[0]


def row(name, choice):
    plan, verdict = choice.plan, choice.verdict
    tail, pace = f"{verdict.ttft_high_s:.2f}", f"{verdict.tpot_s * 1e3:.1f}"
    return [name, label(plan), plan.gpus, tail, pace, f"{verdict.hits:.0%}", f"{plan.usd_per_hour:.2f}"]


headers = ["requests", "deployment", "GPUs", "TTFT tail s", "TPOT ms", "cached", "USD/h"]
print(table(headers, [row("all alike", chosen.confirmed[0]), row("long tails", crowd)]))

# %% [markdown]
# The tail of the prompts is the tail of the first tokens. Every plan comes with the command that starts it, and with the
# `roofline simulate` command that says what the simulator said of it, to the last bit: one instance under its share of the load.

# %%
(chat_launch,) = launches(crowd.plan, drawn.launch_model, drawn.question.load.longest, drawn.stored)
chat_usd = usd_per_mtok(crowd.plan, people.rate * people.osl)
print(f"# {chat_launch.instances} of these behind a load balancer, {chat_usd:.2f} USD per million output tokens")
print(chat_launch.command)
replay = Replay(crowd.plan, drawn.question.load, slo, drawn.question.requests)
print(" ".join(replay.words("llama-3.1-70b", drawn.stored)))

# %% [markdown]
# ## The agent
#
# A session begins with 6,000 tokens of instructions and tools. Each of its steps appends what a tool returned, writes a few
# hundred tokens, and calls the next tool, which takes five seconds; lengths as TraceLab measured them on coding assistants.
# A new session starts every seven seconds. The first token of a step may take three seconds in 95 of 100, each further one
# 40 ms. A mean prompt has tens of thousands of tokens, nearly all of which the server has seen a moment ago.

# %%
steps, limits = SHAPES["coding-step"], Objective(ttft_s=3.0, tpot_s=0.04, percentile=95.0)
agent = demand(steps.prompt, steps.output, rate=0.15, prefix=6000, turns=12, think_s=5.0, kept=True, most=65536)
print(f"{agent.requests:.1f} steps a session, {agent.isl:,} tokens of prompt and {agent.osl} of output a step")
print(f"{agent.lengths().fresh:,.0f} tokens of a prompt are new, if the cache has kept the rest")

# %% [markdown]
# Two plans for it: for servers that keep prefixes, and for servers that compute every prompt whole. A session stays with its
# instance; what was used least recently makes room, so that a cache that is too small forgets sessions while a tool runs.

# %%
warm, cold = (
    solve(Question("llama-3.1-70b", load, limits, gpus[1:], most=64, disaggregation=False, shown=1, requests=100))
    for load in (agent, replace(agent, kept=False))
)
warm_plan, cold_plan = warm.chosen.confirmed[0].plan, cold.chosen.confirmed[0].plan
print(table(headers, [row("prefixes kept", warm.chosen.confirmed[0]), row("nothing kept", cold.chosen.confirmed[0])]))

# %%
(agent_launch,) = launches(warm_plan, warm.launch_model, agent.longest, warm.stored, kept=True)
agent_usd = usd_per_mtok(warm_plan, agent.request_rate * agent.osl)
print(f"# {agent_usd:.2f} USD per million output tokens, {agent_usd * agent.osl / agent.length:.3f} per million of all")
print(agent_launch.command)

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
assert load_server("vllm").check(chat_launch.words)["max_num_seqs"] == crowd.plan.batch
assert crowd.verdict.ttft_high_s <= slo.ttft_s
assert crowd.verdict.ttft_high_s > verdict.ttft_high_s
assert warm.chosen.confirmed[0].verdict.hits > 0.8
assert cold_plan.gpus >= 2 * warm_plan.gpus
assert "--enable-prefix-caching" in agent_launch.words
assert 0.5 < chat_usd < 5
assert agent_usd > chat_usd
print(f"chat {chat_usd:.2f}, agent {agent_usd:.2f} USD per million output tokens;", end=" ")
print(f"agents without a prefix cache: {cold_plan.gpus} GPUs instead of {warm_plan.gpus}")
