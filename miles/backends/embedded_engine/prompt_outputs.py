"""What a forward pass yields besides the next token: scores of prompt tokens, and the experts that tokens went through."""

from __future__ import annotations

import torch

from miles.backends.embedded_engine.attention import Span
from miles.backends.embedded_engine.forward import Model
from miles.backends.embedded_engine.kv_cache import PAGE, PagePool
from miles.backends.embedded_engine.linear import ROW_STEP
from miles.backends.embedded_engine.model_config import ModelConfig
from miles.backends.embedded_engine.request import Request
from miles.backends.embedded_engine.sampler import top_logprobs

_SCORE_ROWS = 256  # prompt positions scored at once: bounds the [rows, vocab] logits


def scored_prompt_tokens(request: Request) -> int:
    """How many prompt tokens get an entry in `input_token_logprobs`."""
    if not request.return_logprob or request.logprob_start_len < 0:
        return 0
    return len(request.input_ids) - request.logprob_start_len


def score_prompt(model: Model, request: Request, span: Span, hidden: torch.Tensor) -> None:
    """Append the log-probs of the prompt tokens that `hidden` [span tokens, hidden] predicts.

    They are the model's own: no temperature, no filters. The first scored token has none.
    """
    if len(request.input_logprobs) >= scored_prompt_tokens(request):
        return
    if not request.input_logprobs:
        request.input_logprobs.append(None)
        request.input_top.append(None)
        request.input_chosen.append(None)
    start = max(span.start, request.logprob_start_len)
    end = min(span.end, len(request.input_ids) - 1)
    for first in range(start, end, _SCORE_ROWS):
        last = min(first + _SCORE_ROWS, end)
        rows = hidden[first - span.start : last - span.start]
        if padding := -len(rows) % ROW_STEP:
            rows = torch.cat([rows, rows[:1].expand(padding, -1)])
        logp = torch.log_softmax(model.logits(rows), dim=-1)[: last - first]
        targets = torch.tensor(request.input_ids[first + 1 : last + 1], device=logp.device)
        request.input_logprobs.extend(logp.gather(1, targets[:, None])[:, 0].tolist())
        for row in logp if request.top_logprobs_num or request.token_ids_logprob else ():
            request.input_top.append(top_logprobs(row, request.top_logprobs_num))
            request.input_chosen.append([(row[t].item(), t) for t in request.token_ids_logprob])


def route_table(config: ModelConfig, routes: list[torch.Tensor]) -> torch.Tensor:
    """Experts of every layer, [rows, layers, top_k] int32 on the host, from one [rows, top_k] a sparse layer; dense ones are 0."""
    assert config.moe is not None
    rows, top_k = routes[0].shape
    table = torch.zeros(rows, config.num_layers, top_k, dtype=torch.int32)
    for layer, chosen in zip(sorted(config.moe.sparse_layers), routes, strict=True):
        table[:, layer] = chosen.to("cpu", torch.int32)
    return table


def store_routes(pool: PagePool, request: Request, start: int, table: torch.Tensor) -> None:
    """Keep the routes of tokens [start, start + rows) beside their keys, and in the request."""
    assert pool.routes is not None
    position = torch.arange(start, start + len(table))
    pages = torch.tensor(request.pages)[position // PAGE]
    pool.routes[pages, position % PAGE] = table
    request.add_routes(table.numpy(), start)
