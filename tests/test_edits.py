"""What-if edits: what each changes, what it leaves alone, and that none is a silent no-op."""

from __future__ import annotations

import pytest

from roofline import InputError, Work, edits, load_model

LLAMA = load_model("llama-3.1-8b")
WORK = Work(4, 1, 8192)


def edited(*changes):
    return edits.apply(LLAMA, changes)


def test_kv_heads_change_cache_projections_and_nothing_else():
    found = edited(edits.kv_heads(2))
    assert found.kv_bytes_per_token * 4 == LLAMA.kv_bytes_per_token
    assert LLAMA.params - found.params == 32 * 2 * 4096 * 6 * 128
    assert edited(edits.kv_heads(32)).kv_bytes_per_token == 4 * LLAMA.kv_bytes_per_token


def test_a_window_caps_the_cache_and_the_reads():
    found = edited(edits.window(1024))
    assert found.state_bytes(8192) == found.state_bytes(10**6) == 1024 * 131072
    assert found.cost(WORK).read["state"] == 4 * 1024 * 131072
    assert found.params == LLAMA.params


def test_a_pattern_alternates_windows_and_global_layers():
    found = edited(edits.pattern("LLLG:1024"))
    assert found.state_bytes(8192) == 32 * 4096 * (24 * 1024 + 8 * 8192) // 32
    assert [layer.blocks[1].mask for layer in found.layers[:4]] == ["window"] * 3 + ["causal"]
    chained = edited(edits.window(1024), edits.pattern("LLLG"))
    assert chained.layers == found.layers
    with pytest.raises(InputError, match=r"--pattern.*LLLG:4096"):
        edited(edits.pattern("LLLG"))


@pytest.mark.parametrize(("every", "kept"), [(1, 32), (2, 16), (3, 11), (4, 8)])
def test_sharing_keeps_one_cache_per_group_of_layers(every, kept):
    """CLA (arXiv 2405.12981): ceil(L / s) layers keep keys and values; all of them still read some."""
    found = edited(edits.share_kv_every(every))
    assert found.kv_bytes_per_token == kept * 4096
    assert found.cost(WORK).read["state"] == LLAMA.cost(WORK).read["state"]
    assert found.cost(WORK).write["state"] == kept * 4 * 4096
    assert LLAMA.params - found.params == (32 - kept) * 2 * 4096 * 1024


def test_a_latent_replaces_keys_and_values():
    found = edited(edits.mla_rank(512))
    assert found.kv_bytes_per_token == 32 * (512 + 64) * 2
    again = edits.apply(found, [edits.mla_rank(256)])
    assert again.kv_bytes_per_token == 32 * (256 + 64) * 2
    assert any("rotary" in note for note in found.assumes)


@pytest.mark.parametrize(
    ("mixer", "state"), [("gated-deltanet", 32 * 128 * 128), ("kda", 32 * 128 * 128), ("mamba2", 128 * 64 * 128)]
)
def test_swapped_layers_keep_a_fixed_state(mixer, state):
    found = edited(edits.swap_attention(f"{mixer}:3of4"))
    assert found.kv_bytes_per_token * 4 == LLAMA.kv_bytes_per_token
    recurrent = [p for n, pieces in found.state for p in pieces if p.grows_with == "nothing" and p.name != "conv"]
    assert recurrent[0].elements == state
    assert found.state_elements_per_sequence > 24 * state
    assert edited(edits.swap_attention(mixer)).kv_bytes_per_token == 0


def test_formats_of_weights():
    everything = edited(edits.dtype("fp32"))
    assert everything.weight_bytes - 2 * LLAMA.weight_bytes == -2 * 65 * 4096, "norms stay as stored"
    inside = edited(edits.dtype("fp8"))
    tables = 2 * 128256 * 4096
    assert inside.weight_bytes == (LLAMA.params - tables - 65 * 4096) + 2 * (tables + 65 * 4096)
    assert any("embedding, head and norms" in note for note in inside.assumes)


def test_experts_of_a_dense_and_a_sparse_model():
    sparse = edited(edits.experts("8:2"))
    per_expert = 3 * 4096 * 14336
    assert sparse.params - LLAMA.params == 32 * (7 * per_expert + 8 * 4096)
    assert sparse.active_params - LLAMA.params == 32 * (per_expert + 8 * 4096)
    more = edits.apply(sparse, [edits.experts("16")])
    assert more.params - sparse.params == 32 * (8 * per_expert + 8 * 4096)
    assert more.kv_bytes_per_token == LLAMA.kv_bytes_per_token, "parameters are no proxy for the cache"
    with pytest.raises(InputError, match="is dense"):
        edited(edits.experts("8"))


def test_minitron_width_and_depth_give_the_published_counts():
    """Llama-3.1-Minitron-4B (arXiv 2408.11796): width 4.51 B, depth 4.54 B parameters."""
    assert edited(edits.prune_width("hidden=3072,ffn=9216")).params == 4512746496
    assert edited(edits.prune_depth(16)).params == 4540469248


def test_minitron_8b_and_4b_from_nemotron_4_15b():
    """arXiv 2407.14679: Minitron-8B 8.27 B and Minitron-4B 4.19 B parameters."""
    nemotron = load_model("nemotron-4-15b")
    assert nemotron.params == 15628775424
    assert edits.apply(nemotron, [edits.prune_width("hidden=4096,ffn=16384")]).params == 8271699968
    assert edits.apply(nemotron, [edits.prune_width("hidden=3072,ffn=9216,heads=24")]).params == 4190509056


def test_edits_chain_in_order():
    first = edited(edits.window(512), edits.pattern("LG"), edits.share_kv_every(4), edits.dtype("fp8"), edits.kv_dtype("fp8"))
    assert first.kv_bytes_per_token == 8 * 4096
    assert first.state_bytes(10**5) == 8 * 512 * 2048, "of each four layers the local one at the front keeps a cache"


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda: edits.kv_heads(5), "--kv-heads: 5 does not divide"),
        (lambda: edits.kv_heads(0), "--kv-heads"),
        (lambda: edits.window(0), "--window"),
        (lambda: edits.pattern("LXG"), "--pattern"),
        (lambda: edits.share_kv_every(0), "--share-kv-every"),
        (lambda: edits.mla_rank(0), "--mla-rank"),
        (lambda: edits.swap_attention("hyena"), "--swap-attention.*gated-deltanet"),
        (lambda: edits.swap_attention("kda:5of4"), "--swap-attention"),
        (lambda: edits.experts("8:9"), "8 experts"),
        (lambda: edits.experts("many"), "--experts"),
        (lambda: edits.prune_width("width=5"), "--prune-width.*hidden=SIZE"),
        (lambda: edits.prune_width("hidden=8192"), "not below"),
        (lambda: edits.prune_width("kv-heads=3"), "do not divide|not below"),
        (lambda: edits.prune_depth(33), "--prune-depth"),
        (lambda: edits.dtype("int4"), "--dtype.*int4-g128"),
        (lambda: edits.dtype("fp9"), "--dtype.*Did you mean"),
    ],
)
def test_bad_edits_name_their_flag(edit, complaint):
    with pytest.raises(InputError, match=complaint):
        edited(edit())


@pytest.mark.parametrize(
    "edit", [edits.kv_heads(2), edits.window(64), edits.share_kv_every(2), edits.kv_dtype("fp8"), edits.unfused()]
)
def test_an_edit_that_finds_nothing_to_change_says_so(edit):
    with pytest.raises(InputError, match=r"no |caches no"):
        edits.apply(load_model("mamba2-2.7b"), [edit])
