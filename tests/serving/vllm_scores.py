"""What vLLM makes of a conversation; run by test_vllm.py with the Python of vLLM's own environment.

``python vllm_scores.py REQUEST ANSWER``: two JSON files. The request names a ``model`` folder and a conversation
(``messages``), how many ``reply_tokens`` to sample greedily, and, where there is one, the folder of an ``adapter``. The
answer holds for the model as it is (``base``), and with the adapter on it (``adapter``): the ids of the prompt and of
the reply, the log-probs of all of them but the first, and why the reply ended.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# Without effect on what is computed: a cache that fits here, no network, no claim on single cores.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)


def main(request_file: Path, answer_file: Path) -> None:
    """Load the model once, and answer."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    request: dict[str, Any] = json.loads(request_file.read_text(encoding="utf-8"))
    adapters = {"base": None}
    if request["adapter"]:
        adapters["adapter"] = LoRARequest("adapter", 1, request["adapter"])
    llm = LLM(
        model=request["model"], dtype="float32", enforce_eager=True, max_model_len=512, enable_lora=len(adapters) > 1
    )
    greedy = SamplingParams(temperature=0, max_tokens=request["reply_tokens"], prompt_logprobs=0, logprobs=0)
    answer = {}
    for name, adapter in adapters.items():
        [output] = llm.chat(request["messages"], greedy, lora_request=adapter, use_tqdm=False)
        prompt, [reply] = list(output.prompt_token_ids), output.outputs
        scores = [*output.prompt_logprobs[1:], *reply.logprobs]
        answer[name] = {
            "prompt": prompt,
            "reply": list(reply.token_ids),
            "logprobs": [
                ranked[token].logprob for ranked, token in zip(scores, [*prompt[1:], *reply.token_ids], strict=True)
            ],
            "ended": reply.finish_reason,
        }
    answer_file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*map(Path, sys.argv[1:]))
