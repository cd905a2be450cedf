"""Tests of the reference that the engine's drafts are compared with."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stoop.config.schema import ModelSpec
from stoop.layers.rope import RopeSpec
from stoop.models.decoder import DecoderSpec
from stoop.models.eagle import EagleSpec
from support.checkpoints import WINDOW, make_model
from support.huggingface import make_exact
from support.reference_drafter import ReferenceDrafter, TargetReference, first_best

TARGETS = (
    "llama2",
    "llama3",
    "llama-linear",
    "smollm2",  # tied
    "llama-biases",
    "mistral",  # a window
    "qwen2-window",  # a window in some layers, biases of q, k and v alone
)
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}

HIDDEN, DRAFTS, TARGET_VOCAB = 32, 24, 60
DECODER = DecoderSpec(
    architecture="llama",
    vocab_size=DRAFTS,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    max_position=64,
    rope=RopeSpec(theta=10000.0),
    dtype="float64",
)
EAGLE3 = EagleSpec(
    method="eagle3",
    decoder=DECODER,
    target_hidden_size=20,
    target_vocab_size=TARGET_VOCAB,
    taps=(0, 2, 3),
    own_embedding=True,
    maps_vocabulary=True,
)
EAGLE1 = EagleSpec(
    method="eagle",
    decoder=replace(DECODER, vocab_size=TARGET_VOCAB),
    target_hidden_size=HIDDEN,
    target_vocab_size=TARGET_VOCAB,
    fc_bias=True,
    own_lm_head=False,
)
BIASED = replace(DECODER, qkv_bias=True, o_bias=True, mlp_bias=True)
HEADS = {
    "eagle1": EAGLE1,
    "eagle1-deep": replace(EAGLE1, decoder=replace(EAGLE1.decoder, num_layers=2)),
    "eagle3": EAGLE3,
    "eagle3-norms": replace(EAGLE3, fc_norms=True, norm_output=True, norm_before_residual=True),
    "eagle3-input-norm": replace(EAGLE3, norm_before_fc=True, fc_bias=True),
    "eagle3-biases": replace(EAGLE3, decoder=BIASED),
    "eagle3-window": replace(EAGLE3, decoder=replace(DECODER, windows=(3,))),
    "eagle3-deep": replace(EAGLE3, decoder=replace(DECODER, num_layers=3)),
}
TOKEN_IDS = [5, 17, 3, 41, 59, 8, 22]


def exact_model(name: str) -> PreTrainedModel:
    model = make_model(name, seed=3)
    make_exact(model)
    return model


def target_spec(config: Any) -> ModelSpec:
    heads, rope = config.num_attention_heads, config.rope_parameters
    qwen2 = config.model_type == "qwen2"
    bias = getattr(config, "attention_bias", False)
    if config.model_type == "mistral":
        windows = (config.sliding_window,) * config.num_hidden_layers
    else:
        kinds = getattr(config, "layer_types", None) or []
        windows = tuple(WINDOW if kind == "sliding_attention" else None for kind in kinds)
    return DecoderSpec(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        max_position=config.max_position_embeddings,
        rope=RopeSpec(
            theta=rope["rope_theta"],
            kind=rope["rope_type"],
            factor=rope.get("factor", 1.0),
            original_max_position=rope.get("original_max_position_embeddings", 0),
            low_freq_factor=rope.get("low_freq_factor", 1.0),
            high_freq_factor=rope.get("high_freq_factor", 4.0),
        ),
        dtype="float64",
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=qwen2 or bias,
        o_bias=bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        windows=windows,
    )


def head_tensors(spec: EagleSpec, seed: int = 0) -> dict[str, Tensor]:
    """Random float64 tensors under their canonical names, all that the head may have."""
    decoder, taps = spec.decoder, len(spec.taps)
    generator = torch.Generator().manual_seed(seed)
    hidden, target_hidden = decoder.hidden_size, spec.target_hidden_size

    def matrix(*shape: int, scale: float = 0.3) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    def norm(size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)

    inputs = taps * target_hidden if taps else hidden + target_hidden
    tensors = {
        "fc.weight": matrix(hidden, inputs),
        "fc.bias": matrix(hidden),
        "input_norm.weight": norm(inputs),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(decoder.vocab_size, hidden),
        "embed_tokens.weight": matrix(spec.target_vocab_size, hidden, scale=1.0),
    }
    # Ascending and with gaps: draft i means a target id of at least i.
    kept = torch.randperm(spec.target_vocab_size, generator=generator)[: decoder.vocab_size]
    tensors["d2t"] = kept.sort().values - torch.arange(decoder.vocab_size)
    for i in range(taps):
        tensors[f"fc_norm.{i}.weight"] = norm(target_hidden)
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    middle = decoder.intermediate_size
    for layer in range(decoder.num_layers):
        width = 2 * hidden if layer == 0 and spec.method == "eagle3" else hidden
        for name, rows, columns in (
            ("self_attn.q_proj", queries, width),
            ("self_attn.k_proj", keys, width),
            ("self_attn.v_proj", keys, width),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", middle, hidden),
            ("mlp.up_proj", middle, hidden),
            ("mlp.down_proj", hidden, middle),
        ):
            tensors[f"layers.{layer}.{name}.weight"] = matrix(rows, columns)
            tensors[f"layers.{layer}.{name}.bias"] = matrix(rows)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            tensors[f"layers.{layer}.{name}.weight"] = norm(hidden)
    return tensors


def make_drafter(spec: EagleSpec, **changed: Tensor) -> ReferenceDrafter:
    """changed: tensors by name, `__` for a dot"""
    generator = torch.Generator().manual_seed(99)
    shape = (spec.target_vocab_size, spec.target_hidden_size)
    embedding, lm_head = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    tensors = head_tensors(spec) | {k.replace("__", "."): v for k, v in changed.items()}
    return ReferenceDrafter(spec, tensors, embedding, lm_head)


def make_streams(spec: EagleSpec, count: int = len(TOKEN_IDS) - 1) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (count, *((len(spec.taps),) if spec.taps else ()), spec.target_hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def logits_of(spec: EagleSpec, count: int = 1, **changed: Tensor) -> Tensor:
    return make_drafter(spec, **changed).draft(TOKEN_IDS, make_streams(spec), count)[1]


@pytest.mark.parametrize("name", TARGETS)
@torch.inference_mode()
def test_target_is_that_of_transformers(name: str) -> None:
    model = exact_model(name)
    spec = target_spec(model.config)
    token_ids = torch.randint(
        spec.vocab_size, (90,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    left: list[Tensor] = []  # the stream that leaves the last layer: hidden_states has it normed
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: left.append(args[0][0]))
    theirs = model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    hook.remove()

    taps, normed, logits = TargetReference(spec, model.state_dict()).streams(token_ids)

    assert taps.shape == (90, spec.num_layers + 1, spec.hidden_size)
    for layer in range(spec.num_layers):
        torch.testing.assert_close(taps[:, layer], theirs.hidden_states[layer][0], **EXACT)
    torch.testing.assert_close(taps[:, -1], left[0], **EXACT)
    torch.testing.assert_close(normed, theirs.hidden_states[-1][0], **EXACT)
    torch.testing.assert_close(logits, theirs.logits[0], **EXACT)


@torch.inference_mode()
def test_taps_come_in_the_order_asked_for() -> None:
    model = exact_model("llama2")
    spec = target_spec(model.config)
    every, _, _ = TargetReference(spec, model.state_dict()).streams(TOKEN_IDS)
    some, _, _ = TargetReference(spec, model.state_dict(), (3, 0)).streams(TOKEN_IDS)
    assert torch.equal(some, every[:, [3, 0]])


def one_layer_target() -> tuple[PreTrainedModel, DecoderSpec, dict[str, Tensor]]:
    """transformers' model cut to its first layer, whose MLP still matters."""
    model = exact_model("llama3")
    model.model.layers = model.model.layers[:1]
    spec = replace(target_spec(model.config), num_layers=1, windows=())
    return model, spec, {k.removeprefix("model."): v for k, v in model.state_dict().items()}


@torch.inference_mode()
def test_eagle3_head_that_ignores_embeddings_is_a_llama_layer() -> None:
    """Its features are the target's embeddings, `fc` is 1, q, k and v read only those."""
    model, decoder, tensors = one_layer_target()
    layer = "layers.0."
    tensors[layer + "hidden_norm.weight"] = tensors[layer + "input_layernorm.weight"]
    tensors["fc.weight"] = torch.eye(decoder.hidden_size, dtype=torch.float64)
    for name in "qkv":
        weight = tensors[f"{layer}self_attn.{name}_proj.weight"]
        tensors[f"{layer}self_attn.{name}_proj.weight"] = torch.cat((0 * weight, weight), dim=1)
    spec = EagleSpec("eagle3", decoder, decoder.hidden_size, decoder.vocab_size, taps=(0,))
    embedding = tensors["embed_tokens.weight"]
    drafter = ReferenceDrafter(spec, tensors, embedding, tensors["lm_head.weight"])

    _, found = drafter.draft(TOKEN_IDS, embedding[TOKEN_IDS[:-1], None], count=1)

    wanted = model(torch.tensor([TOKEN_IDS[:-1]]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(found, wanted, **EXACT)


@torch.inference_mode()
def test_eagle3_head_that_ignores_features_reads_the_next_token() -> None:
    """The attention of the slots is a Llama layer's over the tokens shifted by one."""
    _, decoder, tensors = one_layer_target()
    layer = "layers.0."
    embedding = tensors["embed_tokens.weight"]
    # A zero feature leaves the residual stream bare, so the MLP must be off to compare.
    tensors[layer + "mlp.down_proj.weight"] = 0 * tensors[layer + "mlp.down_proj.weight"]
    bare = TargetReference(decoder, {f"model.{k}": v for k, v in tensors.items()} | tensors)
    entering, leaving = bare.streams(TOKEN_IDS[1:])[0].unbind(dim=1)
    tensors[layer + "hidden_norm.weight"] = torch.ones(decoder.hidden_size, dtype=torch.float64)
    tensors["fc.weight"] = torch.eye(decoder.hidden_size, dtype=torch.float64)
    for name in "qkv":
        weight = tensors[f"{layer}self_attn.{name}_proj.weight"]
        tensors[f"{layer}self_attn.{name}_proj.weight"] = torch.cat((weight, 0 * weight), dim=1)
    spec = EagleSpec("eagle3", decoder, decoder.hidden_size, decoder.vocab_size, taps=(0,))
    drafter = ReferenceDrafter(spec, tensors, embedding, tensors["lm_head.weight"])

    outputs, _ = drafter.run_slots(torch.zeros_like(entering), TOKEN_IDS[1:])

    torch.testing.assert_close(outputs, leaving - entering, **EXACT)


@torch.inference_mode()
def test_eagle1_head_with_an_idle_first_layer_is_a_llama_layer() -> None:
    """`fc` passes the embedding, layer 0 adds nothing, layer 1 is the target's only one."""
    model, decoder, tensors = one_layer_target()
    left: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: left.append(args[0][0]))
    model(torch.tensor([TOKEN_IDS[1:]]), use_cache=False)
    first = {k: v for k, v in tensors.items() if k.startswith("layers.0.")}
    tensors |= {k.replace("layers.0.", "layers.1."): v for k, v in first.items()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] = 0 * first[f"layers.0.{name}.weight"]
    del tensors["layers.0.input_layernorm.weight"]  # EAGLE-1 has none
    eye = torch.eye(decoder.hidden_size, dtype=torch.float64)
    tensors["fc.weight"] = torch.cat((eye, 0 * eye), dim=1)
    spec = EagleSpec(
        "eagle", replace(decoder, num_layers=2), decoder.hidden_size, decoder.vocab_size
    )
    drafter = ReferenceDrafter(
        spec, tensors, tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    )

    _, logits = drafter.draft(TOKEN_IDS, make_streams(spec), count=1)

    torch.testing.assert_close(logits, left[0][-1:] @ tensors["lm_head.weight"].T, **EXACT)


@pytest.mark.parametrize("name", HEADS)
def test_count_does_not_change_earlier_drafts(name: str) -> None:
    spec = HEADS[name]
    drafter, streams = make_drafter(spec), make_streams(spec)
    drafts, logits = drafter.draft(TOKEN_IDS, streams, 5)
    assert len(drafts) == 5 and logits.shape == (5, spec.decoder.vocab_size)
    for count in range(5):
        fewer, fewer_logits = drafter.draft(TOKEN_IDS, streams, count)
        assert fewer == drafts[:count]
        torch.testing.assert_close(fewer_logits, logits[:count], **EXACT)


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_one_pass_over_all_slots(name: str) -> None:
    """Given the features that the drafts fed back, one causal pass predicts them all."""
    spec = HEADS[name]
    drafter, streams = make_drafter(spec), make_streams(spec)
    drafts, logits = drafter.draft(TOKEN_IDS, streams, 5)
    features, next_ids = drafter.features(streams), TOKEN_IDS[1:]
    for draft in drafts[:-1]:
        outputs, _ = drafter.run_slots(features, next_ids)
        features = torch.cat((features, drafter.feedback(outputs)[-1:]))
        next_ids = [*next_ids, draft]
    _, all_logits = drafter.run_slots(features, next_ids)
    torch.testing.assert_close(all_logits[-5:], logits, **EXACT)


def test_eagle1_goes_on_from_its_own_outputs_as_from_the_targets() -> None:
    drafter, streams = make_drafter(EAGLE1), make_streams(EAGLE1)
    drafts, logits = drafter.draft(TOKEN_IDS, streams, 5)
    outputs, _ = drafter.run_slots(streams, TOKEN_IDS[1:])
    further = torch.cat((streams, outputs[-1:]))
    rest, rest_logits = drafter.draft([*TOKEN_IDS, drafts[0]], further, 4)
    assert rest == drafts[1:]
    torch.testing.assert_close(rest_logits, logits[1:], **EXACT)


@pytest.mark.parametrize("name", HEADS)
def test_slots_do_not_see_later_ones(name: str) -> None:
    spec = HEADS[name]
    drafter = make_drafter(spec)
    features = drafter.features(make_streams(spec))
    outputs, _ = drafter.run_slots(features, TOKEN_IDS[1:])
    other_token, _ = drafter.run_slots(features, [*TOKEN_IDS[1:-1], TOKEN_IDS[-1] + 1])
    other_feature, _ = drafter.run_slots(
        torch.cat((features[:-1], features[-1:] + 1)), TOKEN_IDS[1:]
    )
    for other in (other_token, other_feature):
        torch.testing.assert_close(other[:-1], outputs[:-1], **EXACT)
        assert (other[-1] - outputs[-1]).abs().max() > 1e-3


def test_window_hides_old_slots() -> None:
    spec = HEADS["eagle3-window"]
    for checked, sees in ((spec, False), (EAGLE3, True)):
        drafter = make_drafter(checked)
        features = drafter.features(make_streams(checked))
        outputs, _ = drafter.run_slots(features, TOKEN_IDS[1:])
        changed, _ = drafter.run_slots(features, [TOKEN_IDS[1] + 1, *TOKEN_IDS[2:]])
        moved = (changed - outputs).abs().amax(dim=1) > 1e-9
        assert moved.tolist() == [True, True, True] + [sees] * 3  # slots 0 to 5, a window of 3


def test_first_token_is_never_read() -> None:
    """Slot 0 has the embedding of token 1; token 0 reaches it through the stream alone."""
    drafter, streams = make_drafter(EAGLE3), make_streams(EAGLE3)
    _, logits = drafter.draft(TOKEN_IDS, streams, 3)
    _, others = drafter.draft([TOKEN_IDS[0] + 1, *TOKEN_IDS[1:]], streams, 3)
    assert torch.equal(logits, others)


def test_vocabulary_map_has_offsets() -> None:
    drafter, streams = make_drafter(EAGLE3), make_streams(EAGLE3)
    offsets = drafter.tensors["d2t"]
    drafts, logits = drafter.draft(TOKEN_IDS, streams, 6)
    own = logits.argmax(dim=1)
    assert drafts == (own + offsets[own]).tolist()
    assert drafts != own.tolist()
    plain = make_drafter(replace(EAGLE3, maps_vocabulary=False))
    assert plain.draft(TOKEN_IDS, streams, 1)[0] == own[:1].tolist()
    # The next slot embeds the target's id, so only the first draft's logits agree.
    plain_logits = plain.draft(TOKEN_IDS, streams, 2)[1]
    assert torch.equal(plain_logits[0], logits[0])
    assert not torch.allclose(plain_logits[1], logits[1])


@pytest.mark.parametrize(
    ("flag", "first_moves"),
    [
        ("norm_before_fc", True),
        ("fc_norms", True),
        ("fc_bias", True),
        ("norm_before_residual", True),
        ("norm_output", False),  # it matters from the second draft on
    ],
)
def test_each_flag_counts(flag: str, first_moves: bool) -> None:
    plain = logits_of(EAGLE3, 2)
    changed = logits_of(replace(EAGLE3, **{flag: True}), 2)
    moved = (plain - changed).abs().amax(dim=1) > 1e-3
    assert moved.tolist() == [first_moves, True]


@pytest.mark.parametrize("tap", range(3))
def test_fc_reads_the_taps_in_order(tap: int) -> None:
    size = EAGLE3.target_hidden_size
    fc = torch.zeros(HIDDEN, 3 * size, dtype=torch.float64)
    fc[:size, tap * size : (tap + 1) * size] = torch.eye(size)
    streams = make_streams(EAGLE3)

    def features(**flags: bool) -> tuple[dict[str, Tensor], Tensor]:
        drafter = make_drafter(replace(EAGLE3, **flags), fc__weight=fc)
        return drafter.tensors, drafter.features(streams)[:, :size]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, DECODER.rms_norm_eps)

    _, plain = features()
    torch.testing.assert_close(plain, streams[:, tap], **EXACT)
    tensors, each = features(fc_norms=True)
    wanted = normed(streams[:, tap], tensors[f"fc_norm.{tap}.weight"])
    torch.testing.assert_close(each, wanted, **EXACT)
    tensors, together = features(norm_before_fc=True)
    joined = normed(streams.reshape(len(streams), -1), tensors["input_norm.weight"])
    torch.testing.assert_close(together, joined[:, tap * size : (tap + 1) * size], **EXACT)


@pytest.mark.parametrize("flag", ["qkv_bias", "o_bias", "mlp_bias"])
def test_each_bias_counts(flag: str) -> None:
    changed = logits_of(replace(EAGLE3, decoder=replace(DECODER, **{flag: True})))
    assert (logits_of(EAGLE3) - changed).abs().max() > 1e-3


@pytest.mark.parametrize("name", HEADS)
def test_every_tensor_counts_or_is_not_read(name: str) -> None:
    """A head draws exactly on the tensors that its specification names."""
    spec = HEADS[name]
    plain = logits_of(spec, 2)
    for key, tensor in head_tensors(spec).items():
        if key == "d2t":
            continue
        noise = torch.linspace(-0.5, 0.5, tensor.numel(), dtype=torch.float64).view(tensor.shape)
        moved = bool((logits_of(spec, 2, **{key: tensor + noise}) - plain).abs().max() > 1e-9)
        assert moved == is_used(spec, key), key


def is_used(spec: EagleSpec, key: str) -> bool:
    eagle3, decoder = spec.method == "eagle3", spec.decoder
    by_start = {
        "fc.bias": spec.fc_bias,
        "input_norm.": spec.norm_before_fc,
        "fc_norm.": spec.fc_norms,
        "norm.": eagle3,
        "lm_head.": spec.own_lm_head,
        "embed_tokens.": spec.own_embedding,
        "layers.0.input_layernorm.": eagle3,
        "layers.0.hidden_norm.": eagle3,
    }
    by_end = {
        "o_proj.bias": decoder.o_bias,
        **{f"{name}_proj.bias": decoder.qkv_bias for name in "qkv"},
        **{f"{name}_proj.bias": decoder.mlp_bias for name in ("gate", "up", "down")},
        "hidden_norm.weight": False,  # of layers after the first
    }
    for start, used in by_start.items():
        if key.startswith(start):
            return used
    for end, used in by_end.items():
        if key.endswith(end):
            return used
    return True


def test_ties_go_to_the_lowest_id() -> None:
    assert first_best(torch.tensor([0.0, 3.0, 1.0, 3.0])) == 1
    lm_head = torch.zeros(DRAFTS, HIDDEN, dtype=torch.float64)
    drafter = make_drafter(EAGLE3, lm_head__weight=lm_head)
    first = drafter.target_id(0)
    assert drafter.draft(TOKEN_IDS, make_streams(EAGLE3), 3)[0] == [first] * 3


@pytest.mark.parametrize(
    "spec",
    [
        replace(EAGLE3, decoder=replace(DECODER, qk_norm=True)),
        replace(EAGLE3, norm_before_fc=True, fc_norms=True),
        replace(EAGLE3, taps=()),
        replace(EAGLE3, own_lm_head=False),
        replace(EAGLE1, norm_output=True),
    ],
)
def test_open_or_contradictory_heads_are_refused(spec: EagleSpec) -> None:
    with pytest.raises(ValueError):
        make_drafter(spec)


def test_unknown_rope_and_unpaired_streams_are_refused() -> None:
    yarn = replace(DECODER, rope=RopeSpec(theta=10000.0, kind="yarn"))
    with pytest.raises(ValueError, match="yarn"):
        logits_of(replace(EAGLE3, decoder=yarn))
    with pytest.raises(ValueError, match="streams"):
        make_drafter(EAGLE3).draft(TOKEN_IDS, make_streams(EAGLE3, len(TOKEN_IDS)), 1)
