"""PyTorch peers as workers of bench/cpu_training.py: `torch_worker.py WORK.json KIND [DIR]`.

KIND is `nanogpt`, `nanogpt-compile`, `nanogpt-compile-fused` (DIR: a checkout of nanoGPT, whose model.py and optimizer
groups are used as they are; fused: PyTorch's one-pass AdamW, which nanoGPT takes on a GPU only) or `transformers` (with
the AdamW that its Trainer takes).
"""

import sys
from collections.abc import Callable
from typing import Any

from work import Work, keep_stdout, serve


def nanogpt(work: Work, kind: str, folder: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    import torch

    sys.path.insert(0, folder)
    from model import GPT, GPTConfig

    shape = {"n_layer": work.layers, "n_head": work.heads, "n_embd": work.embed, "block_size": work.context}
    vocab_size = 50304 if work.vocab_size == 50257 else work.vocab_size  # nanoGPT pads GPT-2's
    model = GPT(GPTConfig(**shape, vocab_size=vocab_size, dropout=0.0, bias=True))
    betas = (work.beta1, work.beta2)
    optimizer = model.configure_optimizers(work.weight_decay, work.lr, betas, "cpu")
    if "fused" in kind:
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in optimizer.param_groups]
        optimizer = torch.optim.AdamW(groups, lr=work.lr, betas=betas, eps=work.eps, fused=True)
    forward = torch.compile(model) if "compile" in kind else model
    return model, optimizer, lambda x, y: forward(x, y)[1]


def transformers(work: Work) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=work.vocab_size,
        n_positions=work.context,
        n_embd=work.embed,
        n_layer=work.layers,
        n_head=work.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).train()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": work.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=work.lr, betas=(work.beta1, work.beta2), eps=work.eps, fused=True)
    # shift_labels: the targets are next tokens already, as for everyone here
    return model, optimizer, lambda x, y: model(input_ids=x, labels=y, shift_labels=y, use_cache=False).loss


def main() -> None:
    work, kind = Work.load(sys.argv[1]), sys.argv[2]
    say = keep_stdout()

    import numpy as np
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(work.threads)
    model, optimizer, loss_of = transformers(work) if kind == "transformers" else nanogpt(work, kind, sys.argv[3])
    tokens = np.fromfile(work.tokens, np.int32).reshape(-1, work.rows, work.context + 1)
    done = 0

    def step() -> Any:
        nonlocal done
        window = torch.from_numpy(tokens[done % len(tokens)].astype(np.int64))
        done += 1
        loss = loss_of(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        loss.backward()
        if work.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def run(count: int) -> float:
        loss = None
        for _ in range(count):
            loss = step()
        return float("nan") if loss is None else loss.item()

    serve(work, run, say, torch=torch.__version__, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
