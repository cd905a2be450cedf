"""The unrolled passes against a slow twin that knows no masks, shifts or packs."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from stoop.models.decoder import DecoderModel
from stoop.models.eagle import EagleHead, EagleSpec
from stoop.models.loader import load_model
from stoop.train import attention, unroll
from stoop.train.head import make_head_spec, new_head, trained
from stoop.train.packing import Pack, make_pack
from stoop.train.settings import HeadSettings
from stoop.train.vocabulary import Vocabulary
from support import training

DRAFT_IDS = np.arange(4, training.VOCAB, dtype=np.int64)
DECAY = 0.8
CPU = torch.device("cpu")


def make_head(target: DecoderModel, **changes: bool) -> EagleHead:
    settings = HeadSettings(taps="3,0,1", **changes)
    spec: EagleSpec = make_head_spec(target.spec, settings, len(DRAFT_IDS))
    head = new_head(spec, target, Vocabulary(DRAFT_IDS, training.VOCAB, 1.0), 100, seed=5)
    generator = torch.Generator().manual_seed(1)
    for weight in trained(head).values():  # norms of one would hide a wrong one
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


@pytest.fixture(scope="module")
def model(target: Path) -> DecoderModel:
    return load_model(training.make_job(target, target).config())


def documents(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    draw = np.random.default_rng(seed)
    lengths = (11, 4, 9, 2)
    return [draw.integers(0, training.VOCAB, n) for n in lengths], np.array([3, 1, 5, 1])


def losses_and_grads(
    head: EagleHead, model: DecoderModel, pack: Pack, passes: ModuleType = unroll
) -> tuple[list[Tensor], list[Tensor]]:
    lesson = passes.make_lesson(model, head, pack, torch.from_numpy(DRAFT_IDS))
    found = passes.unroll(head, lesson)
    weights = list(trained(head).values())
    return found.losses, torch.autograd.grad(passes.total_loss(found.losses, DECAY), weights)


def naive(head: EagleHead, target: Path) -> tuple[list[Tensor], list[Tensor]]:
    twin = training.NaivePasses(head, target, DRAFT_IDS.tolist())
    each: list[list[Tensor]] = [[] for _ in range(training.PASSES)]
    for tokens, prompt_len in zip(*documents(), strict=True):
        for number, found in enumerate(twin.losses(tokens.tolist(), prompt_len, training.PASSES)):
            each[number] += found
    losses = [torch.stack(found).mean() for found in each]
    total = sum(DECAY**number * loss for number, loss in enumerate(losses))
    return losses, torch.autograd.grad(total, list(twin.weights.values()))


def distance(
    first: tuple[list[Tensor], list[Tensor]], second: tuple[list[Tensor], list[Tensor]]
) -> float:
    pairs = zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("flags", [{}, {"norm_output": False}, {"fc_norm": False}])
def test_losses_and_gradients_are_those_of_the_naive_passes(
    model: DecoderModel, target: Path, flags: dict[str, bool]
) -> None:
    head = make_head(model, **flags)
    pack = make_pack(*documents(), training.PASSES, CPU)
    assert distance(losses_and_grads(head, model, pack), naive(head, target)) < 1e-9


SHIFTS = {
    "token late": ("roll(-1 - number)", "roll(-number)"),
    "token early": ("roll(-1 - number)", "roll(-2 - number)"),
    "label late": ("label_of[anchors + 1 + number]", "label_of[anchors + number]"),
    "label early": ("label_of[anchors + 1 + number]", "label_of[anchors + 2 + number]"),
    "position of the anchor": ("pack.positions + number", "pack.positions"),
    "true features in later passes": ("states, features = head", "states, _ = head"),
}


@pytest.mark.parametrize("mutant", SHIFTS)
def test_a_shift_by_one_is_noticed(model: DecoderModel, target: Path, mutant: str) -> None:
    head = make_head(model)
    pack = make_pack(*documents(), training.PASSES, CPU)
    wrong = training.mutated(unroll, *SHIFTS[mutant])
    assert distance(losses_and_grads(head, model, pack, wrong), naive(head, target)) > 1e-3


PATTERNS = {
    "own keys of the last pass only": ("q, *kept)", "q, *kept[:2], *kept[2:][-2:])"),
    "own keys forgotten": ("q, *kept)", "q, *kept[:2])"),
    "context of the newest pass": ("q, *kept)", "q, *kept[-2:], *kept[2:])"),
    "own key not among them": ("q, *kept)", "q, *(kept[:-2] or kept))"),
    "an anchor sees what follows": ("seen = distance >= 0", "seen = distance >= -1"),
    "not itself": ("seen = distance >= 0", "seen = (distance > 0) | (place == 0)"),
}


@pytest.mark.parametrize("mutant", PATTERNS)
def test_a_wrong_attention_pattern_is_noticed(
    model: DecoderModel, target: Path, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(model)
    pack = make_pack(*documents(), training.PASSES, CPU)
    wrong = training.mutated(attention, *PATTERNS[mutant])
    monkeypatch.setattr(unroll, "UnrolledContext", wrong.UnrolledContext)
    assert distance(losses_and_grads(head, model, pack), naive(head, target)) > 1e-3


def test_a_pack_is_its_documents_one_at_a_time(model: DecoderModel) -> None:
    head, passes = make_head(model), training.PASSES
    texts, prompt_lens = documents()
    together = unroll.make_lesson(model, head, make_pack(texts, prompt_lens, passes, CPU), None)
    all_labels, accepted = [], []
    for tokens, prompt_len in zip(texts, prompt_lens, strict=True):
        alone = make_pack([tokens], np.array([prompt_len]), passes, CPU)
        lesson = unroll.make_lesson(model, head, alone, torch.from_numpy(DRAFT_IDS))
        accepted.append(unroll.unroll(head, lesson).accepted)
        all_labels.append(unroll.make_lesson(model, head, alone, None).labels)
    torch.testing.assert_close(together.labels, torch.cat(all_labels), rtol=0, atol=1e-12)
    pack = make_pack(texts, prompt_lens, passes, CPU)
    lesson = unroll.make_lesson(model, head, pack, torch.from_numpy(DRAFT_IDS))
    assert torch.equal(unroll.unroll(head, lesson).accepted, torch.cat(accepted))


def test_anchors_that_are_trained() -> None:
    """The picture of packing.py: a prompt of 2 tokens and an answer of 4."""
    pack = make_pack([np.arange(6)], np.array([2]), 3, CPU)
    assert [each.tolist() for each in pack.anchors] == [[1, 2, 3], [1, 2], [1]]
    assert pack.label_places.tolist() == [2, 3, 4]
    with_prompts = make_pack([np.arange(6)], np.array([0]), 1, CPU)
    assert with_prompts.anchors[0].tolist() == [0, 1, 2, 3]
    assert with_prompts.label_places.tolist() == [1, 2, 3, 4]


def test_windows_and_shared_keys_as_in_torch() -> None:
    """The target's attention, which need not be full."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(9, n, 4, generator=generator).double() for n in (6, 2, 2))
    layout = make_pack([np.zeros(5, int), np.zeros(4, int)], np.ones(2, int), 1, CPU).layout
    for window in (None, 2):
        shape = SimpleNamespace(scale=0.5, window=window)
        out = attention.attend(layout, shape, q, k, v)  # type: ignore[arg-type]
        for part in layout.slices():
            place = torch.arange(part.stop - part.start)
            gap = place[:, None] - place
            seen = (gap >= 0) & (gap < (window or 99))
            heads = (x[part].transpose(0, 1)[None] for x in (q, k, v))
            wanted = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=0.5, enable_gqa=True
            )
            torch.testing.assert_close(out[part], wanted[0].transpose(0, 1))


def test_gradients_where_query_heads_share_keys() -> None:
    generator = torch.Generator().manual_seed(2)
    leaves = [
        torch.randn(7, n, 4, generator=generator).double().requires_grad_(True)
        for n in (6, *[2] * 6)
    ]
    layout = make_pack([np.zeros(4, int), np.zeros(3, int)], np.ones(2, int), 1, CPU).layout
    shape = SimpleNamespace(scale=0.5, window=None)
    assert torch.autograd.gradcheck(lambda *x: attention.attend(layout, shape, *x), leaves)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_passes", [1, 4])
def test_flash_attention_is_the_dense_one(num_passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (300, 17, 130)
    texts = [np.zeros(n, int) for n in lengths]
    layout = make_pack(texts, np.ones(3, int), 1, torch.device("cuda")).layout
    shape = SimpleNamespace(scale=0.125, window=None)
    sizes = [9, *[3] * (2 * num_passes)]
    inputs = [torch.randn(sum(lengths), n, 64, generator=generator) for n in sizes]
    grad = torch.randn(inputs[0].shape, generator=generator).cuda().bfloat16()
    results = []
    for dense in (False, True):
        monkeypatch.setattr(attention, "_flash", lambda q, dense=dense: not dense)
        leaves = [x.cuda().bfloat16().requires_grad_(True) for x in inputs]
        out = attention.attend(layout, shape, *leaves)  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for ours, wanted in zip(*results, strict=True):
        error = (ours.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 0.02
