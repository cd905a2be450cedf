"""Descriptors, the plan of graphs, and the choice of one."""

import logging
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoop.core.sampling_kind import SamplingKind
from stoop.graph.descriptor import BatchExecutionDescriptor, GraphMode, RunMode
from stoop.graph.dispatch import BatchShape, Dispatcher, default_sizes
from stoop.graph.plan import MANY_TOKENS, GraphLimits, max_mixed_size, plan_graphs
from stoop.graph.support import GraphSupport

N, P, F, S = RunMode.NONE, RunMode.PIECEWISE, RunMode.FULL, RunMode.STEP
GREEDY, NOISE, SAMPLING = SamplingKind.GREEDY, SamplingKind.NOISE, SamplingKind.FULL
SUPPORT = [
    GraphSupport.NEVER,
    GraphSupport.SINGLE_TOKEN,
    GraphSupport.UNIFORM,
    GraphSupport.ALWAYS,
]


# ---- modes, by support: never, single token, uniform, always ----

DECODE_ONE = {
    "none": (N, N, N, N),
    "piecewise": (P, P, P, P),
    "full": (P, F, F, F),
    "full_decode_only": (N, F, F, F),
    "full_and_piecewise": (P, F, F, F),
    "step": (P, S, S, S),
}
DECODE_MANY = {
    "none": (N, N, N, N),
    "piecewise": (P, P, P, P),
    "full": (P, P, F, F),
    "full_decode_only": (N, N, F, F),
    "full_and_piecewise": (P, P, F, F),
    "step": (P, P, S, S),
}
MIXED = {
    "none": (N, N, N, N),
    "piecewise": (P, P, P, P),
    "full": (P, P, P, F),
    "full_decode_only": (N, N, N, N),
    "full_and_piecewise": (P, P, P, P),
    "step": (P, P, P, F),
}


def test_tables_name_every_mode() -> None:
    names = {mode.value for mode in GraphMode}
    assert names == set(DECODE_ONE) == set(DECODE_MANY) == set(MIXED)
    assert sorted(GraphSupport) == SUPPORT


@pytest.mark.parametrize("query_len", [1, 2, 3, 8])
@pytest.mark.parametrize("name", DECODE_ONE)
def test_decode_mode(name: str, query_len: int) -> None:
    table = DECODE_ONE if query_len == 1 else DECODE_MANY
    modes = tuple(GraphMode(name).decode_mode(support, query_len) for support in SUPPORT)
    assert modes == table[name]


@pytest.mark.parametrize("name", MIXED)
def test_mixed_mode(name: str) -> None:
    assert tuple(GraphMode(name).mixed_mode(support) for support in SUPPORT) == MIXED[name]


def test_modes_are_in_order() -> None:
    assert N < P < F < S
    assert sorted(RunMode) == [N, P, F, S]


def test_stronger_support_never_takes_graphs_away() -> None:
    for mode, query_len in product(GraphMode, (1, 4)):
        decode = [mode.decode_mode(support, query_len) for support in SUPPORT]
        mixed = [mode.mixed_mode(support) for support in SUPPORT]
        assert decode == sorted(decode) and mixed == sorted(mixed)


# ---- descriptors ----

WHOLE = BatchExecutionDescriptor(S, 8, 4, 2, GREEDY)


def test_equal_descriptors_are_one_key() -> None:
    again = BatchExecutionDescriptor(
        RunMode.STEP, num_tokens=8, num_reqs=4, query_len=2, sampling=SamplingKind("greedy")
    )
    assert again == WHOLE and hash(again) == hash(WHOLE) and again is not WHOLE
    assert {WHOLE: "graph"}[again] == "graph"


def test_every_field_tells_descriptors_apart() -> None:
    others = [
        replace(WHOLE, mode=F),
        replace(WHOLE, num_tokens=9),
        replace(WHOLE, num_reqs=5),
        replace(WHOLE, num_reqs=None),
        replace(WHOLE, query_len=1),
        replace(WHOLE, query_len=None),
        replace(WHOLE, sampling=NOISE),
        replace(WHOLE, sampling=None),
    ]
    assert len({WHOLE, *others}) == 1 + len(others)
    assert len({str(d) for d in (WHOLE, *others)}) == 1 + len(others)


def test_descriptor_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        WHOLE.num_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        (WHOLE, "STEP 8 tokens, 4 reqs, 2 a request, greedy"),
        (BatchExecutionDescriptor(P, 64), "PIECEWISE 64 tokens"),
        (BatchExecutionDescriptor(F, 64, 16), "FULL 64 tokens, 16 reqs"),
        (BatchExecutionDescriptor(F, 3, 3, 1), "FULL 3 tokens, 3 reqs, 1 a request"),
        (BatchExecutionDescriptor(N, 7, 2), "NONE 7 tokens, 2 reqs"),
    ],
)
def test_descriptor_in_words(descriptor: BatchExecutionDescriptor, text: str) -> None:
    assert str(descriptor) == text


# ---- sizes and the plan ----


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9, 63, 64, 65, 100, 511, 512, 513, 5000, 8192])
def test_default_sizes(limit: int) -> None:
    sizes = default_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == limit
    assert {1, 2, 4} & set(range(limit + 1)) <= set(sizes)
    for small, large in pairwise(sizes):
        assert large <= 2 * small  # padding at most doubles a batch
        assert large - small <= max(8, small // 4)
    assert set(sizes[:-1]) <= set(default_sizes(8192))
    assert len(sizes) <= (23 if limit <= 512 else 40)


LIMITS = st.builds(
    lambda max_reqs, more, query_lens, sizes, largest, max_mixed: GraphLimits(
        max_reqs, max_reqs * query_lens[-1] + more, query_lens, sizes, largest, max_mixed
    ),
    st.integers(1, 700),
    st.sampled_from([0, 1, 7, 500, 8192]),
    st.integers(1, 6).map(lambda query_len: (query_len,))
    | st.sampled_from([(1, 2), (1, 2, 4), (1, 2, 3, 6), (1, 2, 3, 5, 9, 17)]),
    st.none() | st.lists(st.integers(1, 800), max_size=6).map(tuple),
    st.sampled_from([512, 512, 100, 2048]),
    st.sampled_from([0, 0, 300, 4096]),
)
MODES = st.sampled_from(list(GraphMode))
SUPPORTS = st.sampled_from(SUPPORT)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(mode=MODES, support=SUPPORTS, limits=LIMITS)
def test_plan_holds_no_nonsense(
    mode: GraphMode, support: GraphSupport, limits: GraphLimits
) -> None:
    plan = plan_graphs(mode, support, limits)
    decode_mode = mode.decode_mode(support, limits.query_lens[-1])
    mixed_mode = mode.mixed_mode(support)
    assert len(set(plan)) == len(plan)
    for descriptor in plan:
        assert descriptor.mode is not N
        assert 0 < descriptor.num_tokens <= limits.max_tokens
        assert descriptor.num_reqs is None or 0 < descriptor.num_reqs <= limits.max_reqs
        if descriptor.query_len is not None:
            assert descriptor.mode is decode_mode and decode_mode >= F
            assert descriptor.query_len in limits.query_lens
            assert descriptor.num_reqs is not None
            assert descriptor.num_tokens == descriptor.num_reqs * descriptor.query_len
            assert (descriptor.sampling is not None) == (decode_mode is S)
            assert limits.sizes is None or descriptor.num_reqs in limits.sizes
        else:
            assert descriptor.mode in (decode_mode, mixed_mode) and descriptor.mode <= F
            assert descriptor.sampling is None
            assert (descriptor.num_reqs is None) == (descriptor.mode is P)
            assert descriptor.num_reqs is None or descriptor.num_reqs <= descriptor.num_tokens
            assert limits.sizes is None or descriptor.num_tokens in limits.sizes
    Dispatcher(plan)  # which refuses duplicates itself


@settings(max_examples=40, deadline=None, derandomize=True)
@given(mode=MODES, support=SUPPORTS, limits=LIMITS)
def test_every_decode_batch_finds_a_decode_graph(
    mode: GraphMode, support: GraphSupport, limits: GraphLimits
) -> None:
    limits = replace(limits, sizes=None)
    decode_mode = mode.decode_mode(support, limits.query_lens[-1])
    dispatcher = Dispatcher(plan_graphs(mode, support, limits))
    for query_len in limits.query_lens:
        varies = len(limits.query_lens) > 1 and query_len > 1
        captured = default_sizes(min(limits.max_reqs, limits.max_default))
        if varies:
            most_tokens = max(MANY_TOKENS, limits.max_default)
            captured = [size for size in captured if size * query_len <= most_tokens]
        for reqs, kind in product(range(1, captured[-1] + 1), SamplingKind):
            shape = BatchShape(reqs, reqs * query_len, True, kind)
            found = dispatcher.dispatch(shape)
            if decode_mode >= F:
                assert found.mode is decode_mode and found.query_len == query_len
                assert found.num_reqs is not None and reqs <= found.num_reqs <= limits.max_reqs
                few = varies and found.num_tokens <= MANY_TOKENS
                most = 16 if few and reqs <= 128 else max(32, reqs // 4)
                assert found.num_reqs - reqs < most, "little padding"
                assert found.sampling is (kind if decode_mode is S else None)
            elif shape.num_tokens <= limits.max_default:
                assert found.mode is decode_mode
            assert found.num_tokens >= shape.num_tokens


def test_few_graphs_verify_many_drafts_where_their_number_varies() -> None:
    def sizes_of(limits: GraphLimits) -> dict[int | None, list[int | None]]:
        plan = plan_graphs(GraphMode.FULL_DECODE_ONLY, GraphSupport.UNIFORM, limits)
        lens = limits.query_lens
        return {each: [d.num_reqs for d in plan if d.query_len == each] for each in lens}

    limits = GraphLimits(250, 8192, (1, 2, 4, 8), None)
    few = [1, 2, 4, 8, 16, 32, 48, 64]
    more = [*few, 80, 96, 112, 128]
    assert sizes_of(limits) == {
        1: default_sizes(250),
        2: [*more, 160, 192, 224, 250],
        4: more,
        8: few,
    }
    assert sizes_of(replace(limits, max_default=1024)) == {
        1: default_sizes(250),
        2: [*more, 160, 192, 224, 250],
        4: [*more, 160, 192, 224, 250],
        8: [*few, 96, 128],
    }
    assert sizes_of(replace(limits, query_lens=(8,))) == {8: default_sizes(250)}
    given = replace(limits, sizes=(3, 24, 200))
    assert sizes_of(given) == {query_len: [3, 24, 200] for query_len in (1, 2, 4, 8)}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(mode=MODES, support=SUPPORTS, limits=LIMITS)
def test_every_mixed_batch_up_to_the_largest_size_finds_its_graph(
    mode: GraphMode, support: GraphSupport, limits: GraphLimits
) -> None:
    limits = replace(limits, sizes=None)
    dispatcher = Dispatcher(plan_graphs(mode, support, limits))
    wanted = mode.mixed_mode(support)
    more = limits.max_mixed if wanted is F else 0
    largest = min(limits.max_tokens, max(limits.max_default, more))
    for tokens in range(1, largest + 1, 3):
        for reqs in {1, min(tokens, limits.max_reqs)}:
            found = dispatcher.dispatch(BatchShape(reqs, tokens, False, GREEDY))
            assert (found.mode, found.query_len, found.sampling) == (wanted, None, None)
            assert tokens <= found.num_tokens <= limits.max_tokens
            assert found.num_reqs is None or found.num_reqs >= reqs


def test_decode_graphs_never_exceed_the_tokens_of_a_step() -> None:
    """With few tokens a step, not all requests fit into one decode batch."""
    limits = GraphLimits(max_reqs=256, max_tokens=256, query_lens=(4,), sizes=None)
    plan = plan_graphs(GraphMode.STEP, GraphSupport.UNIFORM, limits)
    assert max(d.num_tokens for d in plan) <= limits.max_tokens
    found = Dispatcher(plan).dispatch(BatchShape(64, 256, True, GREEDY))
    assert found.mode is S


def test_step_captures_each_kind_of_sampling() -> None:
    limits = GraphLimits(4, 16, (1,), None)
    plan = plan_graphs(GraphMode.STEP, GraphSupport.ALWAYS, limits)
    steps = [(d.num_reqs, d.sampling) for d in plan if d.mode is S]
    assert sorted(steps, key=str) == sorted(product((1, 2, 4), SamplingKind), key=str)
    assert [(d.mode, d.num_tokens, d.num_reqs) for d in plan if d.mode is not S] == [
        (F, 1, 1),
        (F, 2, 2),
        (F, 4, 4),
        (F, 8, 4),
        (F, 16, 4),
    ]


def test_sizes_of_the_user_are_taken_as_they_are() -> None:
    limits = GraphLimits(8, 32, (2,), (16, 3, 3, 8, 100))
    plan = plan_graphs(GraphMode.FULL_AND_PIECEWISE, GraphSupport.ALWAYS, limits)
    assert plan == [
        BatchExecutionDescriptor(F, 6, 3, 2),
        BatchExecutionDescriptor(F, 16, 8, 2),
        BatchExecutionDescriptor(P, 3),
        BatchExecutionDescriptor(P, 8),
        BatchExecutionDescriptor(P, 16),
    ]


def test_the_largest_default_size_bounds_both_kinds_of_batch() -> None:
    for largest in (1, 6, 100):
        limits = GraphLimits(64, 512, (2,), None, max_default=largest)
        planned = plan_graphs(GraphMode.FULL_AND_PIECEWISE, GraphSupport.ALWAYS, limits)
        decode = [d.num_reqs for d in planned if d.query_len is not None]
        mixed = [d.num_tokens for d in planned if d.query_len is None]
        assert (decode, mixed) == (default_sizes(min(64, largest)), default_sizes(largest))


def test_more_for_mixed_batches_leaves_decode_batches_alone() -> None:
    limits = GraphLimits(64, 4096, (1, 8), None, max_default=128)
    usual, more = (
        plan_graphs(GraphMode.STEP, GraphSupport.ALWAYS, replace(limits, max_mixed=largest))
        for largest in (0, 4096)
    )
    assert [d for d in more if d.query_len] == [d for d in usual if d.query_len]
    assert [d.num_tokens for d in more if not d.query_len] == default_sizes(4096)


@pytest.mark.parametrize("mode", list(GraphMode))
def test_pieces_are_never_large(mode: GraphMode) -> None:
    """Each holds its own tensors: those of 8,192 tokens and fewer would take gigabytes."""
    limits = GraphLimits(64, 8192, (1,), None, max_default=1024, max_mixed=8192)
    for support in SUPPORT:
        plan = plan_graphs(mode, support, limits)
        sizes = {each: {d.num_tokens for d in plan if d.mode is each} for each in (P, F)}
        assert max(sizes[P], default=0) <= 1024
        if mode.mixed_mode(support) is F:
            assert max(sizes[F]) == 8192


def test_small_models_have_graphs_for_more_tokens() -> None:
    """Where launching takes as long as running; no more than a step has."""
    smollm2, llama_1b, llama_8b = (30, 134_515_008), (16, 1_235_814_400), (32, 8_030_261_248)
    assert [max_mixed_size(*each, 8192) for each in (smollm2, llama_1b, llama_8b)] == [
        8192,
        2560,
        768,
    ]
    assert max_mixed_size(*smollm2, 8192, half=False) == 5120
    assert max_mixed_size(*smollm2, 3000) == 3000
    assert max_mixed_size(*smollm2, 65536) == 8192
    assert max_mixed_size(1, 10**12, 8192) == 1


@pytest.mark.parametrize(
    ("mode", "support"),
    [
        (GraphMode.NONE, GraphSupport.ALWAYS),
        (GraphMode.FULL_DECODE_ONLY, GraphSupport.NEVER),
    ],
)
def test_nothing_is_planned(mode: GraphMode, support: GraphSupport) -> None:
    limits = GraphLimits(8, 32, (1,), None)
    assert plan_graphs(mode, support, limits) == []
    found = Dispatcher([]).dispatch(BatchShape(3, 3, True, GREEDY))
    assert found == BatchExecutionDescriptor(N, 3, 3)


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="stoop"):
        plan_graphs(GraphMode.STEP, GraphSupport.UNIFORM, GraphLimits(2, 8, (1,), None))
    text = caplog.text
    assert all(word in text for word in ("step", "STEP", "PIECEWISE", "UNIFORM"))


# ---- dispatch ----


def step_graph(reqs: int, kind: SamplingKind, query_len: int = 1) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(S, reqs * query_len, reqs, query_len, kind)


def test_smallest_fitting_graph() -> None:
    dispatcher = Dispatcher([BatchExecutionDescriptor(P, size) for size in (64, 8, 16, 1)])
    sizes = [
        dispatcher.dispatch(BatchShape(1, n, False, GREEDY)).num_tokens
        for n in (1, 2, 8, 9, 16, 17, 63, 64)
    ]
    assert sizes == [1, 8, 8, 16, 16, 64, 64, 64]


def test_eager_where_none_fits() -> None:
    dispatcher = Dispatcher([BatchExecutionDescriptor(P, 8), step_graph(4, GREEDY)])
    assert dispatcher.dispatch(BatchShape(3, 9, False, GREEDY)) == BatchExecutionDescriptor(N, 9, 3)
    assert dispatcher.dispatch(BatchShape(9, 9, True, GREEDY)) == BatchExecutionDescriptor(N, 9, 9)


def test_decode_before_mixed_and_mixed_where_decode_ends() -> None:
    full = BatchExecutionDescriptor(F, 4, 4, 1)
    large = BatchExecutionDescriptor(F, 16, 16, 1)
    mixed = [BatchExecutionDescriptor(F, size, size) for size in (1, 2, 3, 4, 16, 32)]
    dispatcher = Dispatcher([*mixed, full, large])
    assert dispatcher.dispatch(BatchShape(3, 3, True, GREEDY)) is full
    assert dispatcher.dispatch(BatchShape(5, 5, True, GREEDY)) is large
    assert dispatcher.dispatch(BatchShape(17, 17, True, GREEDY)) is mixed[-1]


@pytest.mark.parametrize("kind", SamplingKind)
def test_batch_with_a_prompt_never_takes_a_decode_graph(kind: SamplingKind) -> None:
    """Also where it has a decode batch's very shape: one token of each request's prompt."""
    decode = [step_graph(n, k) for n in (1, 2, 4) for k in SamplingKind]
    decode += [BatchExecutionDescriptor(F, n, n, 1) for n in (1, 2, 4)]
    for mixed in ([], [BatchExecutionDescriptor(P, 4)]):
        dispatcher = Dispatcher([*decode, *mixed])
        for reqs, tokens in [(1, 1), (2, 2), (4, 4), (1, 4), (2, 3), (3, 4), (5, 5)]:
            found = dispatcher.dispatch(BatchShape(reqs, tokens, False, kind))
            assert found.query_len is None and found.sampling is None
            assert found.mode is (P if mixed and tokens <= 4 else N)


def test_step_graph_of_the_right_sampling() -> None:
    graphs = [step_graph(n, kind) for n in (2, 4) for kind in SamplingKind]
    dispatcher = Dispatcher(graphs)
    for kind, reqs in product(SamplingKind, (1, 2, 3, 4)):
        found = dispatcher.dispatch(BatchShape(reqs, reqs, True, kind))
        assert found == step_graph(2 if reqs <= 2 else 4, kind)


def test_sampling_without_a_graph_takes_one_without_sampling() -> None:
    plain = BatchExecutionDescriptor(F, 4, 4, 1)
    dispatcher = Dispatcher([step_graph(2, GREEDY), plain])
    assert dispatcher.dispatch(BatchShape(1, 1, True, GREEDY)) == step_graph(2, GREEDY)
    assert dispatcher.dispatch(BatchShape(1, 1, True, NOISE)) is plain
    assert dispatcher.dispatch(BatchShape(3, 3, True, GREEDY)) is plain
    only_greedy = Dispatcher([step_graph(2, GREEDY)])
    assert only_greedy.dispatch(BatchShape(1, 1, True, SAMPLING)).mode is N


def test_requests_count_as_well_as_tokens() -> None:
    narrow, wide = BatchExecutionDescriptor(F, 8, 2), BatchExecutionDescriptor(F, 16, 8)
    dispatcher = Dispatcher([wide, narrow])
    assert dispatcher.dispatch(BatchShape(2, 8, False, GREEDY)) is narrow
    assert dispatcher.dispatch(BatchShape(3, 8, False, GREEDY)) is wide
    assert dispatcher.dispatch(BatchShape(9, 9, False, GREEDY)).mode is N


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    decode=st.sets(st.tuples(st.integers(1, 20), st.sampled_from([None, *SamplingKind]))),
    mixed=st.dictionaries(st.integers(1, 40), st.none() | st.integers(1, 20)),
    query_len=st.integers(1, 3),
    reqs=st.integers(1, 25),
    extra=st.integers(0, 20),
    kind=st.sampled_from(list(SamplingKind)),
    is_decode=st.booleans(),
)
def test_dispatch_by_search(
    decode: set[tuple[int, SamplingKind | None]],
    mixed: dict[int, int | None],
    query_len: int,
    reqs: int,
    extra: int,
    kind: SamplingKind,
    is_decode: bool,
) -> None:
    decode_graphs = [
        BatchExecutionDescriptor(S if k else F, n * query_len, n, query_len, k) for n, k in decode
    ]
    mixed_graphs = [BatchExecutionDescriptor(F if n else P, t, n) for t, n in mixed.items()]
    tokens = reqs * query_len if is_decode else reqs + extra
    shape = BatchShape(reqs, tokens, is_decode, kind)

    def smallest(graphs: list[BatchExecutionDescriptor]) -> list[BatchExecutionDescriptor]:
        fitting = [
            g
            for g in graphs
            if g.num_tokens >= tokens and (g.num_reqs is None or g.num_reqs >= reqs)
        ]
        return sorted(fitting, key=lambda g: g.num_tokens)[:1]

    candidates = smallest([g for g in decode_graphs if g.sampling is kind])
    candidates += smallest([g for g in decode_graphs if g.sampling is None])
    candidates = (candidates if is_decode else []) + smallest(mixed_graphs)
    want = (candidates or [BatchExecutionDescriptor(N, tokens, reqs)])[0]
    assert Dispatcher([*decode_graphs, *mixed_graphs]).dispatch(shape) == want


def test_two_graphs_of_one_size_are_an_error() -> None:
    with pytest.raises(AssertionError):
        Dispatcher([BatchExecutionDescriptor(P, 8), BatchExecutionDescriptor(F, 8, 8)])
    with pytest.raises(AssertionError):
        Dispatcher([step_graph(2, GREEDY), step_graph(2, GREEDY)])
    with pytest.raises(AssertionError):
        Dispatcher([BatchExecutionDescriptor(P, 0)])


def test_names_that_a_user_may_write_are_those_that_exist() -> None:
    from stoop.attention.registry import BACKENDS
    from stoop.config.backends import backend_names
    from stoop.config.resolve import GRAPH_MODES

    assert set(backend_names()) == set(BACKENDS)
    assert set(GRAPH_MODES) == {mode.value for mode in GraphMode}
