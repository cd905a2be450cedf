"""Models whose tokenizer drops the space that begins a text, and puts a bos in front of it."""

from pathlib import Path

import pytest
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from stoop import LLM, SamplingParams
from support.checkpoints import write_llama
from support.engines import make_llm
from support.sentencepiece_tokenizer import BOS, EOS, build, write_tokenizer

VOCAB = build().get_vocab()
BLUE = VOCAB["\u2581blue"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ONLY_BLUE = GREEDY.replace(logit_bias={BLUE: 100.0}, max_tokens=3)
# Many words, and no bytes but those of ASCII.
WORDS = {VOCAB[f"<0x{byte:02X}>"]: -100.0 for byte in range(128, 256)} | {
    VOCAB[piece]: 4.0 for piece in VOCAB if piece.startswith("\u2581")
}
PROMPTS = ("sky is", "sky is ", "", "the sky\n\nis: é", "x" * 60)


@pytest.fixture(scope="module", params=["normalizer", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"sentencepiece-{request.param}")
    write_llama(folder, seed=3, vocab_size=len(VOCAB), bos_token_id=BOS, eos_token_id=EOS)
    write_tokenizer(folder, metaspace=request.param == "metaspace")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder, max_num_seqs=4)


def as_vllm_decodes(folder: Path, prompt_ids: list[int], ids: list[int]) -> str:
    """The stream of the tokenizers library, led through the prompt first."""
    backend = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))._tokenizer
    stream = DecodeStream(skip_special_tokens=True)
    for token_id in prompt_ids:
        stream.step(backend, token_id)
    return "".join(stream.step(backend, token_id) or "" for token_id in ids)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_and_answer_are_the_text_of_all_tokens(llm: LLM, prompt: str, seed: int) -> None:
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, logit_bias=WORDS)
    output = llm.generate(prompt, params)[0]
    ids = output.outputs[0].token_ids
    shown = tokenizer.decode(output.prompt_token_ids)
    assert "\ufffd" not in output.outputs[0].text
    assert shown + output.outputs[0].text == tokenizer.decode([*output.prompt_token_ids, *ids])
    texts = [part.outputs[0].text for part in llm.stream(prompt, params)]
    assert texts[-1] == output.outputs[0].text
    assert all(texts[-1].startswith(text) for text in texts)


def test_an_answer_keeps_its_leading_space(llm: LLM, folder: Path) -> None:
    output = llm.generate("sky is", ONLY_BLUE)[0]
    assert output.outputs[0].token_ids == [BLUE] * 3
    assert output.outputs[0].text == " blue blue blue"
    assert as_vllm_decodes(folder, output.prompt_token_ids, [BLUE] * 3) == " blue blue blue"


def test_the_start_of_a_text_has_no_space(llm: LLM, folder: Path) -> None:
    """Nothing but a bos comes before it."""
    assert llm.generate([BOS], ONLY_BLUE)[0].outputs[0].text == "blue blue blue"
    assert as_vllm_decodes(folder, [BOS], [BLUE] * 3) == "blue blue blue"


def test_a_stop_string_may_begin_with_the_space(llm: LLM) -> None:
    stopped = llm.generate("sky is", ONLY_BLUE.replace(stop=" blue"))[0].outputs[0]
    assert (stopped.text, stopped.token_ids) == ("", [BLUE])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " blue")


def test_chat_has_one_bos_and_an_answer_with_its_space(llm: LLM, folder: Path) -> None:
    """The template writes the bos; to encode its text as a prompt would add another."""
    output = llm.chat([{"role": "user", "content": "sky"}], ONLY_BLUE)[0]
    assert output.prompt == "<s>[INST] sky [/INST]"
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.prompt_token_ids[0] == BOS
    assert output.outputs[0].text == " blue blue blue"  # as vLLM shows it
    assert as_vllm_decodes(folder, output.prompt_token_ids, [BLUE] * 3) == " blue blue blue"


def test_a_text_prompt_has_one_bos(llm: LLM) -> None:
    assert llm.generate("sky", GREEDY)[0].prompt_token_ids.count(BOS) == 1
