"""The environment variables attnkit reads: all of them, with what they do.

In: nothing. Out: `ENVIRONMENT`, from which the docs are generated; a test fails when the code reads
a variable that is not in it. Each is read where it is used.
"""

ENVIRONMENT: dict[str, str] = {
    "ATTNKIT_BACKEND": "the backend that backend='auto' means, by any name selection knows",
    "ATTNKIT_CACHE_DIR": "where converted checkpoints and built kernels are kept "
    "(default: attnkit in XDG_CACHE_HOME, or in ~/.cache)",
    "ATTNKIT_VLLM": "the backend that runs inside vLLM; unset: vLLM's own on a CPU, and triton where a "
    "GPU's user asks for CUSTOM",
    "ATTNKIT_CPU_NATIVE": "0: the cpu backend runs in torch alone and builds no C; else it is "
    "built once, by the compiler that CC names, or cc, gcc or clang",
}
