"""Draft heads of every layout: what is settled, where tensors go, what they compute."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stoop.config.errors import CheckpointError
from stoop.layers.attention import Attention
from stoop.layers.stateful import number_layers, stateful_layers
from stoop.models.decoder import DecoderModel
from stoop.models.eagle import EagleHead, EagleSpec
from stoop.models.head_config import read_head_spec
from stoop.models.head_source import canonical_names
from stoop.ops.rope import Rotation
from stoop.ops.rope import rotate as turn_heads
from support.head_layouts import (
    DIM,
    DRAFT,
    DRAFTING,
    EAGLE1,
    EAGLE3,
    EPS,
    HEADS,
    KV,
    LAYOUTS,
    SIZE,
    TARGET,
    THETA,
    VOCAB,
    Config,
    Layout,
    Tensors,
    decoder,
    eagle3,
    every_layout,
    flat,
    load,
    make_target,
    make_tensors,
    midlayer,
    speculators,
    write,
    write_layout,
)


@every_layout
def test_a_spec_has_every_field(tmp_path: Path, layout: Layout) -> None:
    write_layout(tmp_path, layout)
    found = read_head_spec(tmp_path, TARGET)
    assert dataclasses.asdict(found) == dataclasses.asdict(layout.spec)
    assert read_head_spec(tmp_path, TARGET, method=layout.spec.method) == found


def own_parameters(head: EagleHead, wanted: Tensors) -> dict[str, Tensor | None]:
    """Every parameter with the tensors it is to hold, stacked where the head stacks them."""

    def stacked(prefix: str, *names: str, kind: str = "weight") -> Tensor:
        return torch.cat([wanted[f"{prefix}.{name}.{kind}"] for name in names])

    parameters: dict[str, Tensor | None] = {}
    layers = {"first": "layers.0", **{f"rest.{i}": f"layers.{i + 1}" for i in range(9)}}
    for name, _ in head.named_parameters():
        module = name.removesuffix(".weight").removesuffix(".own")
        for ours, theirs in layers.items():
            module = module.replace(ours + ".", theirs + ".")
        if "qkv_proj" in module:
            prefix, kind = module.split(".qkv_proj")[0], name.rpartition(".")[2]
            parameters[name] = stacked(prefix, "q_proj", "k_proj", "v_proj", kind=kind)
        elif module.endswith("gate_up_proj"):
            parameters[name] = stacked(module.removesuffix(".gate_up_proj"), "gate_proj", "up_proj")
        else:
            plain = module if module in ("d2t", "fc.bias") else f"{module}.weight"
            parameters[name] = wanted.get(plain)
    return parameters


@every_layout
def test_every_tensor_lands_in_its_place(tmp_path: Path, layout: Layout) -> None:
    tensors = write_layout(tmp_path, layout)
    head = load(tmp_path, read_head_spec(tmp_path, TARGET), dtype="float32")
    wanted = own_parameters(head, tensors)
    for name, parameter in head.named_parameters():
        expected = wanted[name]
        assert expected is not None, name
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(parameter, expected), name
    loaded = sum(parameter.numel() for parameter in head.parameters())
    assert loaded == sum(t.numel() for name, t in tensors.items() if name != "t2d")
    number_layers(stateful_layers(make_target(), head))
    kv_layers = [head.first.self_attn.index, *(layer.self_attn.index for layer in head.rest)]
    assert kv_layers == [6 + index for index in range(layout.spec.decoder.num_layers)]


class CausalContext:
    """Attention of one sequence to itself, written out."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def run(self, layer: Attention, qkv: Tensor, rotation: Rotation) -> Tensor:
        self.layers.append(layer.index)
        kv_heads = layer.shape.num_kv_heads
        return attend(*turn_heads(qkv, kv_heads, rotation, layer.head_norms))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Angles in float32, as everywhere, so that the rest can be compared closely."""
    frequencies = 1.0 / THETA ** (torch.arange(0, DIM, 2) / DIM)
    angles = positions[:, None, None] * frequencies
    turn = torch.complex(angles.cos().double(), angles.sin().double())
    turned = turn * torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
    return torch.cat((turned.real, turned.imag), dim=-1)


class Plain:
    """A head written out tensor by tensor."""

    def __init__(self, tensors: Tensors, spec: EagleSpec, target: DecoderModel) -> None:
        self.w = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        self.spec = spec
        self.embedding = self.w.get("embed_tokens.weight", target.embed_tokens.weight)
        self.lm_head = self.w.get("lm_head.weight", target.lm_head.weight)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def attention(self, prefix: str, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (
            (x @ self.w[f"{prefix}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, DIM))
            for name in "qkv"
        )
        out = attend(rotate(q, positions), rotate(k, positions), v)
        return out.flatten(1) @ self.w[f"{prefix}.self_attn.o_proj.weight"].T

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up = (x @ self.w[f"{prefix}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return (F.silu(gate) * up) @ self.w[f"{prefix}.mlp.down_proj.weight"].T

    def finish(self, prefix: str, x: Tensor) -> Tensor:
        return x + self.mlp(prefix, self.norm(f"{prefix}.post_attention_layernorm", x))

    def condense(self, stacked: Tensor) -> Tensor:
        streams = list(stacked.unbind(dim=1))
        if self.spec.fc_norms:
            streams = [self.norm(f"fc_norm.{i}", x) for i, x in enumerate(streams)]
        x = torch.cat(streams, dim=-1)
        x = self.norm("input_norm", x) if self.spec.norm_before_fc else x
        return x @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding[tokens]
        if self.spec.method == "eagle":
            x = torch.cat((embedded, feature), -1) @ self.w["fc.weight"].T
            x = x + self.w.get("fc.bias", 0)
            x = x + self.attention("layers.0", x, positions)
        else:
            normed = self.norm("layers.0.hidden_norm", feature)
            joined = torch.cat((self.norm("layers.0.input_layernorm", embedded), normed), -1)
            start = normed if self.spec.norm_before_residual else feature
            x = start + self.attention("layers.0", joined, positions)
        x = self.finish("layers.0", x)
        for index in range(1, self.spec.decoder.num_layers):
            prefix = f"layers.{index}"
            normed = self.norm(f"{prefix}.input_layernorm", x)
            x = self.finish(prefix, x + self.attention(prefix, normed, positions))
        if self.spec.method == "eagle":
            return x, x
        normed = self.norm("norm", x)
        return normed, normed if self.spec.norm_output else x


TWO_LAYERS = decoder(num_layers=2, windows=(None, None))
COMPUTED = {
    "eagle1": EAGLE1,
    "eagle1 with bias": dataclasses.replace(EAGLE1, fc_bias=True),
    "eagle1 with its own ends": dataclasses.replace(EAGLE1, own_embedding=True, own_lm_head=True),
    "eagle1 with two layers": dataclasses.replace(EAGLE1, decoder=TWO_LAYERS),
    "eagle3": EAGLE3,
    "eagle3 norm_before_residual": eagle3(norm_before_residual=True),
    "eagle3 norm_output": eagle3(norm_output=True),
    "eagle3 norm_before_fc": eagle3(norm_before_fc=True),
    "eagle3 fc_norms": eagle3(fc_norms=True),
    "eagle3 fc_bias": eagle3(fc_bias=True),
    "eagle3 all flags": eagle3(
        norm_before_residual=True, norm_output=True, norm_before_fc=True, fc_norms=True
    ),
    "eagle3 with two layers": eagle3(decoder=TWO_LAYERS),
    "eagle3 that borrows its lm_head": eagle3(own_lm_head=False),
    "eagle3 of another size with d2t": eagle3(
        decoder=decoder(hidden_size=48, vocab_size=DRAFT),
        own_embedding=True,
        maps_vocabulary=True,
    ),
}


def config_of(spec: EagleSpec) -> Config:
    layers = {
        "hidden_size": spec.decoder.hidden_size,
        "head_dim": DIM,
        "num_hidden_layers": spec.decoder.num_layers,
    }
    if spec.method == "eagle":
        return flat(**layers)
    flags = {
        "fc_norm": spec.fc_norms,
        "norm_before_fc": spec.norm_before_fc,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
    }
    return flat(**layers, **flags, draft_vocab_size=spec.decoder.vocab_size)


def run_twice(head: Any, spec: EagleSpec, forward: Callable[..., Any]) -> list[Tensor]:
    """What a head gives for a sequence, and then for its own features."""
    generator = torch.Generator().manual_seed(3)
    streams = [torch.randn(9, SIZE, generator=generator).double() for _ in range(3)]
    tokens = torch.randint(VOCAB, (9,), generator=generator)
    positions = torch.arange(5, 14)
    stacked = torch.stack(streams, dim=1)
    feature = head.condense(stacked) if spec.method == "eagle3" else streams[0]
    states, fed_back = forward(tokens, feature, positions)
    return [states, fed_back, *forward(tokens.flip(0), fed_back, positions + 1)]


@pytest.mark.parametrize("spec", COMPUTED.values(), ids=COMPUTED)
def test_a_loaded_head_computes_what_the_papers_say(tmp_path: Path, spec: EagleSpec) -> None:
    tensors = make_tensors(spec)
    write(tmp_path, config_of(spec), tensors)
    assert read_head_spec(tmp_path, TARGET) == spec
    target, ctx = make_target(), CausalContext()
    head = load(tmp_path, spec, target=target)
    number_layers(stateful_layers(target, head))
    plain = Plain(tensors, spec, target)
    wanted = run_twice(plain, spec, plain.forward)
    found = run_twice(head, spec, lambda *inputs: head.finish(head(*inputs, ctx)))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    logits = wanted[0] @ plain.lm_head.T
    torch.testing.assert_close(head.logits(found[0]), logits, rtol=1e-9, atol=1e-9)
    assert ctx.layers == 2 * [6 + index for index in range(spec.decoder.num_layers)]


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norms", "fc_bias"]
)
def test_no_flag_is_without_effect(flag: str) -> None:
    """Or the test above would not see it lost."""
    spec, target = eagle3(**{flag: True}), make_target()
    tensors = make_tensors(spec)
    plain = Plain(tensors, spec, target)
    without = Plain({k: v for k, v in tensors.items() if k != "fc.bias"}, EAGLE3, target)
    results = [run_twice(head, head.spec, head.forward)[2] for head in (plain, without)]
    assert (results[0] - results[1]).abs().max() > 0.01


def test_drafts_are_numbered_through_d2t(tmp_path: Path) -> None:
    spec = eagle3(decoder=DRAFTING, maps_vocabulary=True)
    write(tmp_path, flat(draft_vocab_size=DRAFT), make_tensors(spec), midlayer)
    head = load(tmp_path, spec)
    assert head.target_ids(torch.tensor([0, 1, 7, 8, 23])).tolist() == [0, 2, 14, 16, 31]


def test_canonical_names() -> None:
    stored = {
        "midlayer.hidden_norm.weight": "layers.0.hidden_norm.weight",
        "model.layers.1.mlp.up_proj.weight": "layers.1.mlp.up_proj.weight",
        "model.midlayer.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
        "transformer.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
        "fusion_fc.bias": "fc.bias",
        "fc.weight": "fc.weight",
        "aux_norm_low.weight": "fc_norm.0.weight",
        "aux_norm_mid.weight": "fc_norm.1.weight",
        "aux_norm_high.weight": "fc_norm.2.weight",
        "d2t": "d2t",
    }
    assert canonical_names(stored) == {canonical: name for name, canonical in stored.items()}


def test_two_names_of_one_tensor_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"both layers\.0\.a and midlayer\.a, two names"):
        canonical_names(["midlayer.a", "layers.0.a"])


def test_derived_tensors_are_passed_over(tmp_path: Path) -> None:
    tensors = make_tensors(EAGLE3)
    for name in ("rotary_emb", "layers.0.self_attn.rotary_emb"):
        tensors[f"{name}.inv_freq"] = torch.ones(4)
    tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)
    write(tmp_path, flat(), tensors, midlayer)
    assert read_head_spec(tmp_path, TARGET) == EAGLE3
    assert load(tmp_path, EAGLE3).d2t is None


def test_a_tied_head_of_eagle3_has_its_embedding_as_lm_head(tmp_path: Path) -> None:
    spec = eagle3(decoder=decoder(tie_word_embeddings=True), own_embedding=True)
    tensors = make_tensors(spec)
    del tensors["lm_head.weight"]
    write(tmp_path, flat(tie_word_embeddings=True), tensors, midlayer)
    assert read_head_spec(tmp_path, TARGET) == spec
    head = load(tmp_path, spec)
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["embed_tokens.weight"].double())


def test_a_stored_lm_head_goes_before_a_tied_one(tmp_path: Path) -> None:
    spec = eagle3(decoder=decoder(tie_word_embeddings=True), own_embedding=True)
    tensors = make_tensors(spec)
    write(tmp_path, flat(tie_word_embeddings=True), tensors, midlayer)
    head = load(tmp_path, read_head_spec(tmp_path, TARGET))
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"].double())


@pytest.mark.parametrize("spec", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("index", [None, [3, 0, 3]])
def test_taken_rows_are_finished_ones(
    tmp_path: Path, spec: EagleSpec, index: list[int] | None
) -> None:
    write(tmp_path, config_of(spec), make_tensors(spec))
    head = load(tmp_path, spec)
    stream = torch.randn(4, head.spec.decoder.hidden_size).double()
    states, onward = head.finish(stream if index is None else stream[index])
    features = torch.full((6, stream.shape[1]), 7.0).double()
    chosen = None if index is None else torch.tensor(index)
    assert torch.equal(head.take(stream, chosen, features), states)
    assert torch.equal(features[: len(onward)], onward)
    assert not features[len(onward) :].any()


@pytest.mark.parametrize("same", [True, False])
def test_a_copy_of_the_targets_embedding_is_shared(
    tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored in float32, the same only as cast to the engine's bfloat16."""
    target = make_target(dtype=torch.bfloat16)
    spec = eagle3(own_embedding=True)
    tensors = make_tensors(spec)
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.float() * (1 + 1e-4)
    if not same:
        tensors["embed_tokens.weight"][-1, -1] += 0.5
    write(tmp_path, flat(), tensors, midlayer)
    caplog.set_level(logging.INFO)
    head = load(tmp_path, spec, dtype="bfloat16", target=target)
    assert (head.embed_tokens is None) == same
    assert head.spec.own_embedding != same
    assert ("shares the target's embedding" in caplog.text) == same
    features = torch.zeros(2, SIZE, dtype=torch.bfloat16)
    states = head(torch.tensor([1, 2]), features, torch.arange(2), CausalContext())
    assert states.shape == (2, SIZE)


def test_the_rotary_table_is_as_long_as_the_engine_asks(tmp_path: Path) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE1))
    head = load(tmp_path, EAGLE1)
    assert head.rotary is not None
    assert head.rotary.table.shape == (2, 100, DIM // 2)  # its own limit is 64


def test_progress_is_told(tmp_path: Path) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE1))
    told: list[tuple[str, int, int | None]] = []
    head = load(tmp_path, EAGLE1, report=lambda *line: told.append(line))
    total = sum(parameter.numel() for parameter in head.parameters())
    assert told[-1] == ("loading weights", total, total)
    assert len(told) == len(list(head.weight_views()))


def log_line(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (r for r in caplog.records if r.name == "stoop.models.head_config")
    assert record.levelno == logging.INFO
    return record.getMessage()


def test_one_line_tells_what_was_settled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layout = LAYOUTS["eagle3, prefixed, with taps"]
    write_layout(tmp_path, layout)
    read_head_spec(tmp_path, TARGET)
    assert log_line(caplog) == (
        f"draft head {tmp_path}: method eagle3, EAGLE layout, taps=(6, 0, 0, 4) (config), "
        "norm_before_fc=True (config), fc_norm=False (tensors), "
        "norm_before_residual=False (default), norm_output=False (default), "
        "fc_bias=False (tensors), embedding: its own, lm_head: its own, "
        "drafts 24 of 40 tokens through d2t, drafts only up to position 64 of the target's 128"
    )


def test_the_line_tells_defaults_and_what_is_borrowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, speculators("eagle3"), make_tensors(eagle3(own_lm_head=False)))
    read_head_spec(tmp_path, dataclasses.replace(TARGET, max_position=64))
    line = log_line(caplog)
    assert "speculators layout, taps=(2, 3, 3) (default)" in line
    assert "embedding: the target's, lm_head: the target's, drafts 40 of 40 tokens" in line
    assert "position" not in line


def test_the_line_tells_a_bias_that_the_config_has_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, flat(bias=True), make_tensors(EAGLE1))
    assert read_head_spec(tmp_path, TARGET).fc_bias is False
    assert "fc_bias=False (tensors, although the config has bias=True)" in log_line(caplog)


@pytest.mark.parametrize(
    ("num_layers", "taps"), [(30, (2, 15, 27)), (6, (2, 3, 3)), (2, (2, 1, 0)), (1, (1, 0, 0))]
)
def test_default_taps(tmp_path: Path, num_layers: int, taps: tuple[int, ...]) -> None:
    write(tmp_path, flat(), make_tensors(EAGLE3), midlayer)
    target = dataclasses.replace(TARGET, num_layers=num_layers)
    assert read_head_spec(tmp_path, target).taps == taps
