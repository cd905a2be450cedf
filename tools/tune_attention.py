"""Times attention tilings, to choose the constants in ops/kernels/attention.py.

On a CUDA device: PYTHONPATH=.:tests python tools/tune_attention.py
"""

from stoop.ops.kernels import attention as kernels
from support.attention_cases import LLAMA_8B, Heads, Load, make_load


def timed(load: Load) -> str:
    try:
        return f"{1e3 * load.milliseconds():8.1f}"
    except Exception as error:  # out of shared memory
        return type(error).__name__[:8].rjust(8)


PROMPTS = (
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
    (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 4),
)  # fmt: skip
SPLITS = (
    (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 4, 5), (32, 4, 4), (32, 4, 6), (128, 4, 2),
    (128, 4, 3), (64, 2, 4), (32, 2, 5), (64, 8, 4), (128, 8, 3),
)  # fmt: skip


def main() -> None:
    print("microseconds")
    for heads in (LLAMA_8B, Heads(8, 4, 64)):
        loads = [make_load(1, 6144, 2048, heads, 0), make_load(1, 0, 8192, heads, 0)]
        for shape in PROMPTS:
            tiling = kernels.AttentionTiling(*shape)
            kernels.prompt_tiling = lambda *_, tiling=tiling: tiling
            print(f"{heads.size} prompt {tiling}:", *map(timed, loads))
        sizes = ((1, 512), (1, 8192), (8, 8192), (32, 512))
        loads = [make_load(batch, context, 4, heads, 4) for batch, context in sizes]
        for shape in SPLITS:
            tiling = kernels.AttentionTiling(16, *shape)
            kernels.split_tiling = lambda *_, tiling=tiling: tiling
            print(f"{heads.size} splits {tiling}:", *map(timed, loads))


if __name__ == "__main__":
    main()
