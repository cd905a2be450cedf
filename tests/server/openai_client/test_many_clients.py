"""OpenAI's clients at once, and clients that leave."""

import asyncio
import time

import pytest
from openai import AsyncOpenAI

from stoop import LLM, SamplingParams
from support.openai_client import stats, until_idle
from support.server import ServerProcess


def test_many_async_streams(server: ServerProcess, llm: LLM) -> None:
    prompts = [f"prompt number {number}" for number in range(24)]

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=20, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def every() -> list[str]:
        async with AsyncOpenAI(base_url=server.api, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert asyncio.run(every()) == [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(stream: bool, server: ServerProcess) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=server.api, api_key="x", max_retries=0) as client:
            asked = client.completions.create(
                model="tiny",
                prompt=["a", "b"],
                n=2,
                max_tokens=500,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
            if stream:
                answers = await asked
                async for _ in answers:
                    break
                await answers.close()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asked, 0.2)

    def num_steps() -> int:
        time.sleep(0.5)  # counters are up to a quarter of a second old
        return int(stats(server)["num_steps"])

    until_idle(server)
    before = num_steps()
    asyncio.run(leave())
    at_once = num_steps()
    until_idle(server)
    assert 0 < at_once - before < 300  # it was cut short,
    assert num_steps() == at_once  # and nothing ran on
