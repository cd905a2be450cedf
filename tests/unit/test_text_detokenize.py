"""Text out of tokens as they come: never half a character, never past a stop string."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from stoop.config.errors import RequestError
from stoop.text import detokenize
from stoop.text.detokenize import IncrementalDetokenizer, StopChecker, TextStream
from stoop.text.tokenizer import Tokenizer


@cache
def byte_tokenizer() -> Tokenizer:
    """A token for each byte, some words, a piece of an emoji, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    emoji_letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0]
    words = [
        "Ġhello",
        "Ġ\u0120",
        "lo",
        emoji_letters[:2],
        emoji_letters[2:],
        emoji_letters[1:3] + "a",
    ]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend)


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Words that begin with a block, byte-fallback tokens, and a special token."""
    tokens = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokens += ["▁", "a", "b", "▁a", "▁b", "é", "▁▁", "\ufffd"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def stream(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.append(chunk) for chunk in chunks]
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return detokenizer.text


any_chunks = st.lists(st.lists(st.integers(0, 270), max_size=4), max_size=60)
high_bytes = st.lists(st.lists(st.integers(120, 255), min_size=1, max_size=2), max_size=90)


@given(chunks=any_chunks | high_bytes, skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_increments_join_to_the_whole_text(chunks: list[list[int]], skip: bool) -> None:
    tokenizer = byte_tokenizer()
    all_ids = [token_id for chunk in chunks for token_id in chunk]
    assert stream(tokenizer, chunks, skip) == tokenizer.decode(all_ids, skip)


@given(text=st.text(max_size=40), size=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_text_survives_in_any_pieces(text: str, size: int) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert stream(tokenizer, chunks) == tokenizer.decode(ids)


def byte_runs_are_valid(ids: Sequence[int]) -> bool:
    """Whether each run of byte-fallback tokens is UTF-8."""
    run = b""
    for token_id in [*ids, 0]:
        if 2 <= token_id < 258:
            run += bytes([token_id - 2])
        elif token_id != 1:  # a special token that is skipped does not end a run
            try:
                run.decode()
            except UnicodeDecodeError:
                return False
            run = b""
    return True


spm_words = st.integers(258, 265) | st.just(1)
spm_characters = st.characters(codec="utf-8").map(
    lambda letter: [byte + 2 for byte in letter.encode()]
)
spm_sequences = st.lists(spm_words.map(lambda word: [word]) | spm_characters, max_size=30)


@given(groups=spm_sequences)
@settings(max_examples=300, deadline=None)
def test_sentencepiece_increments_join_to_the_whole_text(groups: list[list[int]]) -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = [token_id for group in groups for token_id in group]
    assert byte_runs_are_valid(ids)
    assert stream(tokenizer, [[token_id] for token_id in ids]) == tokenizer.decode(ids)


def test_a_replacement_character_spelled_in_bytes_ends_its_run() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = [byte + 2 for byte in "\ufffd\u0800".encode()]
    assert stream(tokenizer, [[token_id] for token_id in ids]) == "\ufffd\u0800"


@given(ids=st.lists(st.integers(0, 266), max_size=120))
@settings(max_examples=200, deadline=None)
def test_invalid_byte_runs_end_and_lose_no_words(ids: list[int]) -> None:
    tokenizer = sentencepiece_tokenizer()
    text = stream(tokenizer, [[token_id] for token_id in ids])
    if byte_runs_are_valid(ids):
        assert text == tokenizer.decode(ids)
    assert text.count("é") >= ids.count(263)


@pytest.mark.parametrize("seed", range(20))
def test_long_garbage_joins_to_the_whole_text(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of UTF-8's longer characters: the window overflows while a character is open."""
    tokenizer = byte_tokenizer()
    num_shortened = 0
    shorten = IncrementalDetokenizer._shorten_window

    def count(detokenizer: IncrementalDetokenizer) -> str:
        nonlocal num_shortened
        num_shortened += 1
        return shorten(detokenizer)

    monkeypatch.setattr(IncrementalDetokenizer, "_shorten_window", count)
    monkeypatch.setattr(detokenize, "MAX_WINDOW_TOKENS", 17)
    ids_by_byte = {byte: tokenizer.encode(chr(byte))[-1] for byte in (0x80, 0x98, 0x9F, 0xBF)}
    ids_by_byte[0xF0] = tokenizer.encode("😀")[0]
    ids_by_byte[0xE2] = tokenizer.encode("€")[0]
    # Mostly first bytes, so that few characters are completed.
    ids = random.Random(seed).choices(list(ids_by_byte.values()), [1, 1, 1, 1, 6, 6], k=600)
    assert stream(tokenizer, [[token_id] for token_id in ids]) == tokenizer.decode(ids)
    assert num_shortened > 0


def test_half_a_character_is_held_back() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("é😀!", add_special_tokens=False)
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    assert pieces == ["", "é", "", "", "", "😀", "!"]


def test_invalid_bytes_are_not_held_for_long() -> None:
    tokenizer = byte_tokenizer()
    invalid_id = tokenizer.encode("\u00e9", add_special_tokens=False)[1]  # a stray continuation
    detokenizer = IncrementalDetokenizer(tokenizer)
    num_released = len(detokenizer.append([invalid_id] * 100))
    assert num_released >= 97
    assert detokenizer.append(tokenizer.encode("a")) == "\ufffd" * (100 - num_released) + "a"


def test_finish_releases_what_was_held() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.append(tokenizer.encode("😀")[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert detokenizer.text == "\ufffd"


def test_special_tokens_are_shown_when_asked() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<s>a</s>")
    assert stream(tokenizer, [ids]) == "a"
    assert stream(tokenizer, [ids], skip=False) == "<s>a</s>"


def test_ids_outside_the_vocabulary_give_no_text() -> None:
    tokenizer = byte_tokenizer()
    letter = tokenizer.encode("a")[0]
    assert stream(tokenizer, [[letter, 99999, letter]]) == "aa"


def test_text_goes_on_behind_a_prompt() -> None:
    tokenizer = sentencepiece_tokenizer()
    prompt_ids, ids = [1, 261], [261, 262]  # "a", then " a b"
    assert IncrementalDetokenizer(tokenizer, prompt_ids).append(ids) == " a b"
    assert IncrementalDetokenizer(tokenizer, [1]).append(ids) == "a b"
    assert IncrementalDetokenizer(tokenizer).append(ids) == "a b"
    assert IncrementalDetokenizer(tokenizer, [261] * 50).append(ids) == " a b"


def test_a_character_split_between_prompt_and_output_is_whole() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("😀")
    assert IncrementalDetokenizer(tokenizer, ids[:2]).append(ids[2:]) == "😀"
    assert IncrementalDetokenizer(tokenizer, [*tokenizer.encode("x" * 40), *ids[:2]]).append(
        ids[2:]
    ) == ("😀")


@given(prompt=spm_sequences, answer=spm_sequences, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_prompt_and_answer_join_to_the_whole_text(
    prompt: list[list[int]], answer: list[list[int]], skip: bool
) -> None:
    tokenizer = sentencepiece_tokenizer()
    prompt_ids, ids = list(chain(*prompt)), list(chain(*answer))
    assert byte_runs_are_valid(prompt_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip)
    pieces = [detokenizer.append([token_id]) for token_id in ids]
    text = "".join(pieces) + detokenizer.finish()
    before = tokenizer.decode(prompt_ids, skip)
    assert before + text == tokenizer.decode(prompt_ids + ids, skip)


def test_only_the_end_of_a_long_prompt_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    prompt_ids = tokenizer.encode("word " * 2000)
    looked_at = 0
    has_text = Tokenizer.has_text

    def counted(self: Tokenizer, token_id: int, skip_special_tokens: bool = True) -> bool:
        nonlocal looked_at
        looked_at += 1
        return has_text(self, token_id, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "has_text", counted)
    IncrementalDetokenizer(tokenizer, prompt_ids)
    assert looked_at <= detokenize.MAX_TAIL_TOKENS


@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_prompt_may_end_inside_a_character(text: str, data: st.DataObject) -> None:
    """Both kinds of bytes; the answer shows the whole character."""
    text = "x" + text.replace("\ufffd", "")
    for tokenizer, ids in (
        (byte_tokenizer(), byte_tokenizer().encode(text)),
        (sentencepiece_tokenizer(), [byte + 2 for byte in text.encode()]),
    ):
        place = data.draw(st.integers(0, len(ids)))
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:place])
        found = detokenizer.append(ids[place:]) + detokenizer.finish()
        assert text.encode()[:place].decode(errors="ignore") + found == text


def test_cost_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counted(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(tokenizer, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    words = tokenizer.encode("word é " * 300)
    IncrementalDetokenizer(tokenizer).append(words)
    assert sum(lengths) < 5 * len(words)
    lengths.clear()
    stray = [tokenizer.encode("é")[1]] * 3000
    IncrementalDetokenizer(tokenizer).append(stray)
    assert max(lengths) <= detokenize.MAX_WINDOW_TOKENS + 1
    assert len(lengths) < 2 * len(stray)


def run_checker(
    stop: Sequence[str], chunks: Sequence[str], include: bool
) -> tuple[str, str | None]:
    checker = StopChecker(stop, include_stop=include)
    text = "".join(checker.push(chunk) for chunk in chunks) + checker.finish()
    return text, checker.stopped


def expected_stop(stop: Sequence[str], text: str, include: bool) -> tuple[str, str | None]:
    """The definition: read letter by letter until the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        hits = [word for word in stop if text[:end].endswith(word)]
        if hits:
            word = max(hits, key=len)
            return text[: end if include else end - len(word)], word
    return text, None


@given(
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    chunks=st.lists(st.text("ab ", max_size=5), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_stops_do_not_depend_on_the_pieces(
    stop: list[str], chunks: list[str], include: bool
) -> None:
    assert run_checker(stop, chunks, include) == expected_stop(stop, "".join(chunks), include)


def test_only_a_possible_beginning_is_kept_back() -> None:
    checker = StopChecker(["</end>"])
    assert checker.push("text </e") == "text "
    assert checker.push("lse") == "</else"
    assert checker.push("x</end>y") == "x"
    assert checker.stopped == "</end>"
    assert checker.push("more") == ""
    assert checker.finish() == ""


def test_the_stop_that_ends_first_wins() -> None:
    assert run_checker(["abcd", "bc"], ["abcd"], False) == ("a", "bc")
    assert run_checker(["bc", "abc"], ["abc"], False) == ("", "abc")


def test_without_stop_strings_all_text_passes() -> None:
    assert run_checker([], ["a", "b"], False) == ("ab", None)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot be empty"):
        StopChecker(["a", ""])


def test_a_single_string_is_one_stop_string() -> None:
    assert run_checker("ab", ["xab"], False) == ("x", "ab")


def test_a_stream_stops_at_the_token_that_completes_the_string() -> None:
    tokenizer = byte_tokenizer()
    text_stream = TextStream(tokenizer, ["END"])
    assert text_stream.append(tokenizer.encode("one EN")) == "one "
    assert text_stream.append(tokenizer.encode("D two")) == ""
    assert text_stream.stopped == "END"
    assert text_stream.num_tokens == 7
    assert text_stream.append(tokenizer.encode("more")) == text_stream.finish() == ""
    assert text_stream.text == "one "


def test_a_stream_can_show_the_stop_string() -> None:
    tokenizer = byte_tokenizer()
    text_stream = TextStream(tokenizer, ["END"], include_stop=True)
    assert text_stream.append(tokenizer.encode("x END y")) == "x END"


def test_a_stream_that_does_not_stop_releases_all() -> None:
    tokenizer = byte_tokenizer()
    text_stream = TextStream(tokenizer, ["END"])
    text_stream.append(tokenizer.encode("x EN") + tokenizer.encode("😀")[:2])
    assert text_stream.finish() == "EN\ufffd"
    assert text_stream.text == "x EN\ufffd"


def test_the_first_tokens_are_not_searched() -> None:
    tokenizer = byte_tokenizer()
    text_stream = TextStream(tokenizer, ["b"], min_tokens=2)
    text_stream.append(tokenizer.encode("abab"))
    assert text_stream.text == "aba"
    assert text_stream.num_tokens == 4


def test_a_stop_string_counts_by_the_token_that_completes_it() -> None:
    """Two line breaks over tokens 3 and 4: the fourth token completes them."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("ab\n\nrest")
    for min_tokens, text, num_tokens in ((2, "ab", 4), (3, "ab", 4), (4, "ab\n\nrest", 8)):
        for include in (False, True):
            text_stream = TextStream(
                tokenizer, ["\n\n"], include_stop=include, min_tokens=min_tokens
            )
            text_stream.append(ids)
            text_stream.finish()
            stopped = text_stream.stopped is not None
            assert stopped == (min_tokens < 4)
            assert text_stream.text == text + "\n\n" * (stopped and include)
            assert text_stream.num_tokens == num_tokens


def test_the_beginning_of_a_stop_string_is_held_back_within_min_tokens() -> None:
    tokenizer = byte_tokenizer()
    text_stream = TextStream(tokenizer, ["END"], min_tokens=4)
    assert text_stream.append(tokenizer.encode("x EN")) == "x "
    assert text_stream.append(tokenizer.encode("D")) == ""
    assert text_stream.stopped == "END"


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer])
def test_streams_that_cannot_stop_give_the_same_text(make: Callable[[], Tokenizer]) -> None:
    """Without stop strings, a step's ids are taken together. The twin waits for a text that does
    not come. Prompts and steps end anywhere, inside characters too."""
    tokenizer, rng = make(), random.Random(8)
    for _ in range(60):
        ids = [rng.randrange(260) for _ in range(60)]
        prompt, rest = ids[:10], ids[10:]
        plain = TextStream(tokenizer, prompt_ids=prompt)
        twin = TextStream(tokenizer, ["\x00never\x00"], prompt_ids=prompt)
        while rest:
            size = rng.randint(1, 5)
            plain.append(rest[:size])
            twin.append(rest[:size])
            rest = rest[size:]
        assert plain.finish() is not None and twin.finish() is not None
        assert plain.text == twin.text
        assert plain.num_tokens == twin.num_tokens == 50


def expected_stream(
    pieces: list[str], stop: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """The definition: letter by letter, and only letters of later tokens may end a stop string."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        for letter in piece:
            text += letter
            hits = [word for word in stop if text.endswith(word)]
            if hits and number > min_tokens:
                word = max(hits, key=len)
                return text if include else text[: len(text) - len(word)], word, number
    return text, None, len(pieces)


@given(
    words=st.lists(st.sampled_from(["l", "o", "lo", " hello"]), max_size=12),
    stop=st.lists(st.text("lo", min_size=2, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
@settings(max_examples=500, deadline=None)
def test_a_stream_stops_by_definition_whatever_min_tokens(
    words: list[str], stop: list[str], include: bool, min_tokens: int, sizes: list[int]
) -> None:
    """Tokens of several letters, several at once as drafts bring them; text is never taken back."""
    tokenizer = byte_tokenizer()
    known = {"lo": 258, " hello": 256}
    ids = [known[word] if word in known else tokenizer.encode(word)[0] for word in words]
    assert [tokenizer.decode([token_id]) for token_id in ids] == words
    text_stream = TextStream(tokenizer, stop, include_stop=include, min_tokens=min_tokens)
    released = ""
    for size in sizes:
        released += text_stream.append(ids[:size])
        ids = ids[size:]
        assert text_stream.text == released
    released += text_stream.finish()
    text, stopped, num_tokens = expected_stream(words, stop, include, min_tokens)
    assert (released, text_stream.stopped, text_stream.num_tokens) == (text, stopped, num_tokens)


@cache
def real_tokenizer() -> Tokenizer:
    from stoop.checkpoint.fetch import resolve_model

    return Tokenizer.from_folder(resolve_model("smollm2-135m"))


@pytest.mark.model
@given(
    chunks=st.lists(st.lists(st.integers(0, 49200), max_size=4), max_size=40), skip=st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_real_increments_join_to_the_whole_text(chunks: list[list[int]], skip: bool) -> None:
    ids = [token_id for chunk in chunks for token_id in chunk]
    assert stream(real_tokenizer(), chunks, skip) == real_tokenizer().decode(ids, skip)


@pytest.mark.model
@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_real_text_survives_a_token_at_a_time(text: str) -> None:
    ids = real_tokenizer().encode(text, add_special_tokens=False)
    chunks = [[token_id] for token_id in ids]
    assert stream(real_tokenizer(), chunks) == real_tokenizer().decode(ids)


# What transformers gives for the same model and the original's rule for digits.
SKY_PROMPT = "Explain in one paragraph why the sky is blue."
SKY_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28,
    7018, 411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 36971, 281, 582, 8510,
    1701, 260, 6376, 314, 4461, 30, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


@pytest.mark.model
def test_a_real_prompt_has_the_reference_ids() -> None:
    messages = [{"role": "user", "content": SKY_PROMPT}]
    assert real_tokenizer().encode_chat(messages) == SKY_IDS
    assert real_tokenizer().encode(real_tokenizer().render_chat(messages)) == SKY_IDS
