"""Which classes of transformers' language models are exact over a ring, and which are refused, with what words?

    python -m benchmarks.hugging_face.tested_models [--classes LlamaForCausalLM ...] [--page docs/tested_models.md]

For each class, or each of those named, a tiny model with random weights runs forward and backward with eager attention in one
process, then inside ``sequence_parallel`` on CPU processes. A verdict is printed at once; ``--page`` is written after each.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from transformers.models.auto import modeling_auto as auto

from ring_attn_cli.processes import Failure, Worker, WorkerGroups
from ring_attn_torch import sum_gradients
from ring_attn_torch.transformers import sequence_parallel
from ring_attn_torch.transformers.models import own_positions

from ..support import harness

RANKS, TOKENS, VOCAB, SEED = 2, 37, 99, 0
EXACT = 1e-4
"""Bound of the relative error of logits and of each weight's gradient. It allows float32 rounding."""
LARGEST = 50_000_000
"""Largest number of weights in a tiny model. If a model has more, SIZES lacks the name of one of its sizes."""
STARTUP = 300.0
OWN_CODE = "computes attention in its own code"
VERDICTS = {
    "exact": "equal to eager attention in one process, forward and gradients",
    "refused": "refused with an error that says why",
    "own": "refused, because its attention code does not read attn_implementation",
    "differs": "runs over a ring, but is not equal to eager attention",
    "failed": "another error, or no result in time",
    "untried": "not compared, because its tiny model fails with eager attention",
}
SIZES = {
    64: "hidden_size d_model n_embd emb_dim dim intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim "
    "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size feed_forward_size embedding_size n_inner shared_intermediate_size "
    "decoder_hidden_size input_embedding_size output_embedding_size attention_hidden_size",
    16: "head_dim attention_head_size kv_channels v_head_dim qk_head_dim q_lora_rank kv_lora_rank swa_head_dim global_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input sliding_window attention_chunk_size "
    "sliding_window_size local_attention",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts swa_num_attention_heads",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k",
    1: "n_group topk_group n_shared_experts first_k_dense_replace",
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
}
LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"]
NEEDED = ("vocab_size", "n_routed_experts", "num_experts_per_tok")
"""Sizes that are set even if they are None in a class's default config, because its model cannot be made with None."""
KEY_HEADS = {"num_key_value_heads": "num_attention_heads", "swa_num_key_value_heads": "swa_num_attention_heads"}


class Verdict(NamedTuple):
    """A model class's result. ``verdict``: key of VERDICTS. ``error``: largest relative error of logits or gradients, or None."""

    model: str
    verdict: str
    words: str = ""
    error: float | None = None


def classes() -> list[str]:
    """Return the names of transformers' causal and masked language models."""
    mappings = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    names = [name for mapping in mappings for name in mapping.values()]
    return sorted({name for each in names for name in ((each,) if isinstance(each, str) else each)})


def verdicts(names: Iterable[str], seconds: float) -> Iterator[Verdict]:
    """Yield the verdict of each class. If a class kills the processes or takes longer than ``seconds``, start new processes."""
    waiting = deque(names)
    while waiting:
        with WorkerGroups(STARTUP) as groups:
            groups.start("transformers", f"{__package__}.tested_models", [(rank, groups.store) for rank in range(RANKS)])
            _answers(groups, STARTUP)
            while waiting:
                name = waiting.popleft()
                groups.send("transformers", RANKS, name)
                try:
                    of_ranks = _answers(groups, seconds)
                except (Failure, TimeoutError) as error:
                    yield Verdict(name, "failed", str(error).partition("\n")[0])
                    break
                yield max(of_ranks, key=lambda each: (list(VERDICTS).index(each.verdict), each.error or 0))


def page(found: list[Verdict], known: int) -> str:
    """Return the text of docs/tested_models.md: an introduction and tables of verdicts. ``known``: the number of all classes."""
    counts = Counter(each.verdict for each in found)
    lines = [
        "# Tested models",
        "",
        "`python -m benchmarks.hugging_face.tested_models --page docs/tested_models.md` writes this page. For each class of",
        "causal or masked language models in transformers it makes a tiny model with random weights. The model runs forward and",
        f"backward on {TOKENS} tokens in float32: with eager attention in one process, then inside `sequence_parallel`",
        f"on {RANKS} CPU ranks. A class is exact if the relative errors of the logits and of each weight's gradient are at most",
        f"{EXACT:.0e}; the second table shows the largest. The page was written with transformers",
        f"{version('transformers')} on {date.today().isoformat()}.",
        "",
        f"| verdict | classes, {len(found)} of {known} |",
        "|---|---|",
        *(f"| {verdict}: {words} | {counts[verdict]} |" for verdict, words in VERDICTS.items()),
        "",
        "| class | verdict | largest error, or reason |",
        "|---|---|---|",
    ]
    for each in found:
        error = "" if each.error is None else f"{each.error:.1e}"
        words = each.words.partition(": ")[0] if each.verdict in ("refused", "own") else each.words
        words = words.replace("|", "/").replace("<", "&lt;").replace("[", "(").replace("]", ")")
        room = 120 - len(each.model) - len(each.verdict)
        lines.append(
            f"| {each.model} | {each.verdict} | {error or (words if len(words) < room else words[: room - 3] + '...')} |"
        )
    return "\n".join(lines) + "\n"


def work(worker: Worker, rank: int, store: str) -> None:
    """Run one rank: for each model class that the parent names, compare ring and eager attention and report a ``Verdict``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    worker("verdict", None)
    while True:
        try:
            name = worker.recv()
        except EOFError:
            return
        worker("verdict", _verdict(name))


def tiny(kind: Any, causal: bool) -> Any:
    """Return a config of class ``kind`` with the sizes in SIZES. It has a layer per type in ``layer_types``, but at least two."""
    default = vars(kind())
    sizes: dict[str, Any] = {
        name: size
        for size, names in SIZES.items()
        for name in names.split()
        if _count(default.get(name)) or (name in NEEDED and name in default)
    }
    if "qk_rope_head_dim" in sizes and default.get("head_dim") == default["qk_rope_head_dim"]:
        sizes["head_dim"] = 8
    for name, of in KEY_HEADS.items():
        if _count(default.get(name)):
            sizes[name] = 4 if default[name] == default.get(of) else 2
    kinds = list(dict.fromkeys(default.get("layer_types") or ()))
    layers = max(2, len(kinds))
    before = {default[name] for name in LAYERS if _count(default.get(name))}
    sizes |= {name: layers for name in LAYERS if _count(default.get(name))}
    for name, value in default.items():
        if isinstance(value, (list, tuple)) and len(value) in before:
            sizes[name] = list(value)[:layers]
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCAB:
            sizes[name] = 1
    if kinds:
        sizes["layer_types"] = (kinds * 2)[:layers]
    if causal and "is_decoder" in default:
        sizes["is_decoder"] = True
    subs = {name: tiny(sub, causal) for name, sub in kind.sub_configs.items() if hasattr(sub, "sub_configs")}
    return kind(**sizes, **subs)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _answers(groups: WorkerGroups, seconds: float) -> list[Any]:
    """Return the data of one message per rank. Raise TimeoutError after ``seconds`` of waiting, Failure if a process fails."""
    found: list[Any] = []
    end = time.monotonic() + seconds
    while len(found) < RANKS:
        if time.monotonic() > end:
            raise TimeoutError(f"no result within {seconds:g} s")
        found += [message.data for message in groups.receive("transformers", 1)]
    return found


def _verdict(name: str) -> Verdict:
    try:
        model, ids = _model(name)
        expected = _results(model, ids)
    except Exception as error:  # a class of transformers may raise any error on a small config
        return Verdict(name, "untried", _one_line(error))
    model.zero_grad()
    try:
        with sequence_parallel(model, gather_logits=True):
            got = _results(model, ids, lambda: sum_gradients(model))
    except ValueError as error:
        own = "ring_attn_" in traceback.extract_tb(error.__traceback__)[-1].filename
        kind = "failed" if not own else "own" if OWN_CODE in str(error) else "refused"
        return Verdict(name, kind, str(error).removeprefix("rank 0: ").replace("\n", " ") if own else _one_line(error))
    except Exception as error:
        return Verdict(name, "failed", _one_line(error))
    worst, where = _largest_error(got, expected)
    return Verdict(name, "exact" if worst <= EXACT else "differs", "" if worst <= EXACT else f"most in {where}", worst)


def _model(name: str) -> tuple[Any, Any]:
    """Return a model in eval mode and token ids [2, TOKENS], both equal on all ranks.
    The weights are large, because small weights would make all attention scores nearly equal."""
    kind = getattr(transformers, name)
    config = tiny(kind.config_class, "Masked" not in name)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(x.numel() for x in kind(config).parameters())
    if count > LARGEST:
        raise ValueError(f"the tiny config has {count:,} weights")
    torch.manual_seed(SEED)
    model = kind(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim > 1:
                x.normal_(0, x.shape[-1] ** -0.5)
    return model, torch.randint(3, VOCAB - 9, (2, TOKENS))


def _results(model: Any, ids: Any, after: Any = None) -> dict[str, Any]:
    """Run forward and backward, then ``after`` to sum gradients. Return a dict of "logits" and each weight's gradient by name."""
    arguments: dict[str, Any] = {"use_cache": False} if getattr(model.config, "use_cache", False) else {}
    if not own_positions(model) and "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = torch.arange(TOKENS).expand(len(ids), -1)
    out = model(input_ids=ids, labels=ids, **arguments)
    out.loss.backward()
    if after is not None:
        after()
    return {"logits": out.logits.detach()} | {x: p.grad.clone() for x, p in model.named_parameters() if p.grad is not None}


def _largest_error(got: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """Return the largest ||got - expected|| / ||expected|| of an array (NaN counts as inf), and the array's name.
    The divisor is at least 1e-3 times the largest gradient's norm, because some gradients are nearly zero."""
    norms = {name: x.double().norm().item() for name, x in expected.items()}
    least = 1e-3 * max(norm for name, norm in norms.items() if name != "logits")
    errors = {}
    for name in dict.fromkeys((*expected, *got)):  # an unused weight has no gradient, or zeros where ranks sum it
        mine, theirs = (x[name].double() if name in x else 0.0 for x in (got, expected))
        errors[name] = (torch.as_tensor(mine) - torch.as_tensor(theirs)).norm().item() / max(norms.get(name, 0.0), least)
    if nan := [name for name, error in errors.items() if error != error]:
        return float("inf"), nan[0]
    where = max(errors, key=errors.__getitem__)
    return errors[where], where


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


if __name__ == "__main__":
    options = harness.options(__doc__, classes=classes(), seconds=120, page="")
    found: list[Verdict] = []
    for each in verdicts(options.classes, options.seconds):
        found.append(each)
        error = "" if each.error is None else f" ({each.error:.1e})"
        print(f"{each.model}: {VERDICTS[each.verdict]}{error}{each.words and ': ' + each.words}", flush=True)
        if options.page:
            Path(options.page).write_text(page(found, len(classes())))
