"""What `serve` says of flags that other servers have."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_DEVICE = "a worker runs the whole model on one device; --prefill and --decode with --devices use several"
_NO_QUANTIZATION = "leave it out; 8 bits on a CPU: --weights int8, of the KV on a GPU: --kv-cache-dtype"
_NO_REMOTE_CODE = "leave it out; code that comes with a model is never run"
_MEMORY = "use --kv-memory-fraction F: a share of the free memory, for KV alone and not for weights"
_TEXT_ONLY = "leave it out; prompts are text"

HINTS: Mapping[str, str] = {
    "": "MODEL is one argument, and --served-model-name takes one name",
    "--model": "the model is the first argument and has no flag: twinpool serve MODEL",
    "--model-path": "the model is the first argument and has no flag: twinpool serve MODEL",
    "--tokenizer": "leave it out; the tokenizer is the model's",
    "--tokenizer-path": "leave it out; the tokenizer is the model's",
    "--revision": "a revision is not chosen here; fetch it, and give its directory as MODEL",
    "--download-dir": "leave it out; HF_HOME says where models are kept",
    "--trust-remote-code": _NO_REMOTE_CODE,
    "--load-format": "leave it out; safetensors and .gguf are known by themselves",
    "--quantization": _NO_QUANTIZATION,
    "-q": _NO_QUANTIZATION,
    "--chat-template": "the template is the model's; to change it, edit the model's directory",
    "--api-key": "use --api-keys FILE (twinpool api-key new), or TWINPOOL_API_KEYS=tenant:key in the environment",
    "--tensor-parallel-size": f"not there yet: {_ONE_DEVICE}",
    "-tp": f"not there yet: {_ONE_DEVICE}",
    "--tp": f"not there yet: {_ONE_DEVICE}",
    "--tp-size": f"not there yet: {_ONE_DEVICE}",
    "--pipeline-parallel-size": f"not there yet: {_ONE_DEVICE}",
    "-pp": f"not there yet: {_ONE_DEVICE}",
    "--pp-size": f"not there yet: {_ONE_DEVICE}",
    "--data-parallel-size": "use --colocated K, or --prefill N --decode M: so many workers share the requests",
    "-dp": "use --colocated K, or --prefill N --decode M: so many workers share the requests",
    "--dp-size": "use --colocated K, or --prefill N --decode M: so many workers share the requests",
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--num-gpu-blocks-override": "use --num-blocks N",
    "--max-num-batched-tokens": "use --token-budget TOKENS",
    "--chunked-prefill-size": "use --token-budget TOKENS",
    "--max-running-requests": "use --max-num-seqs N, which is of each worker",
    "--max-queued-requests": "use --max-queue-requests N",
    "--context-length": "use --max-model-len TOKENS",
    "--page-size": "use --block-size TOKENS",
    "--swap-space": "leave it out; KV is not swapped: what was pushed out is computed again",
    "--cpu-offload-gb": "leave it out; weights stay on the worker's device",
    "--enable-prefix-caching": "leave it out; it is on (--no-prefix-cache turns it off)",
    "--no-enable-prefix-caching": "use --no-prefix-cache",
    "--disable-radix-cache": "use --no-prefix-cache",
    "--enable-chunked-prefill": "leave it out; prompts always run in chunks (--token-budget)",
    "--no-enable-chunked-prefill": "leave it out; prompts always run in chunks (--token-budget)",
    "--disable-cuda-graph": "use --enforce-eager",
    "--enable-auto-tool-choice": "leave it out; tool calls are read of every model whose chat template takes tools",
    "--enable-reasoning": "leave it out; --reasoning-parser is enough, and auto by default",
    "--guided-decoding-backend": "leave it out; answers in a given form are always held to it by llguidance",
    "--structured-outputs-config": "leave it out; answers in a given form are always held to it by llguidance",
    "--grammar-backend": "leave it out; answers in a given form are always held to it by llguidance",
    "--enable-lora": "LoRA adapters are not there; merge the adapter into the model and serve that",
    "--lora-modules": "LoRA adapters are not there; merge the adapter into the model and serve that",
    "--speculative-config": "leave it out; there is no speculative decoding",
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--task": "leave it out; only answers are generated, there are no embeddings",
    "--runner": "leave it out; only answers are generated, there are no embeddings",
    "--kv-transfer-config": "leave it out; prefill and decode are two pools by default (--prefill, --decode)",
    "--disaggregation-mode": "leave it out; prefill and decode are two pools by default (--prefill, --decode)",
    "--allowed-origins": "use --cors-origin ORIGIN, once for each",
    "--disable-log-requests": "leave it out; no request's text is ever logged",
    "--no-enable-log-requests": "leave it out; no request's text is ever logged",
    "--uvicorn-log-level": "leave it out; the log is one of events, without one line per request",
    "--ssl-keyfile": "HTTP is plain here; put a TLS proxy in front",
    "--ssl-certfile": "HTTP is plain here; put a TLS proxy in front",
    "--generation-config": "leave it out; answers begin with OpenAI's defaults, whatever the model's file says",
    "--seed": "leave it out; a request's own field seed says it",
    "--async-scheduling": "leave it out",
}  # fmt: skip
"""By the flag of vLLM or SGLang: what to do here instead. The hint of "" is for words that stand behind no flag."""
