"""The models that a ring does not support, and the reasons.

Before the first call, checks of classes, config and device refuse what a ring cannot compute. After the first forward on several
ranks, ``MixingLayers`` refuses a model that is not compiled if a layer mixes tokens without calling ring attention. A layer that
does not mix tokens, such as a plain MLP layer, is correct on a shard. To distinguish the two, each layer that did not call ring
attention runs once more on hidden states in which two tokens are NaN: if it mixes tokens, NaN spreads to other tokens.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ring_attn_core.kernels import backends
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.releases import warn_if_untried

from ..ring.groups import is_dtensor
from .masks import CallRing, running
from .mixers import beside_mixers, check_mixers, mixers, older_release
from .states import cache_objection

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of layers, by transformers' names, whose masks are bands or one interval of keys for each query."""

LINEAR_TYPES = {"linear_attention", "conv", "hybrid", "mlp", "moe"}
"""The kinds of further layers, by transformers' names, of hybrid models with the functions that ``mixers.py`` replaces."""

NOT_SOFTMAX = re.compile(
    "Mamba|SSM|DeltaNet|DeltaAttention|Rwkv|RetNet|Retention|RecurrentBlock|RGLRU|Rglru|(?<!Kimi)LinearAttention|LightningAttention|"
    "ShortConv|xLSTM|mLSTM|Hyena|Indexer|Fourier|MobileBertEmbeddings"
)
"""A pattern of the names of module classes that mix tokens without softmax attention over all keys."""

OWN_MASKS = {"DogeAttention": "adds to its mask what it computes of every key's value"}
"""Names of module classes that change attention's mask, and a description of the change for the error."""

DENSE = {"gemma2", "gemma3_text", "llama", "mistral", "modernbert", "phi3", "qwen2", "qwen3"}
"""Models, by config.model_type, whose weights all have a gradient after every backward."""

ROW_HEADS = re.compile("For(Sequence|Image|Video|Audio)Classification|ForMultipleChoice|ForNextSentence|ForQuestionAnswering")
"""A pattern of names of model classes whose head returns one result per row, or whose loss is a softmax over a row's tokens."""


def hugging_face_model(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(
        f"sequence_parallel and enable take a model of transformers, got {type(model).__name__}, which contains none"
    )


def check_config(config: PreTrainedConfig, kind: Any = None) -> None:
    _check_stack(config)
    name, text, kind = type(config).__name__, config.get_text_config(), kind or MODEL_MAPPING.get(type(config), None)
    known = LAYER_TYPES | LINEAR_TYPES if beside_mixers(kind) else LAYER_TYPES
    if kinds := [kind for kind in dict.fromkeys(getattr(text, "layer_types", None) or ()) if kind not in known]:
        raise ValueError(
            f"{type(text).__name__} has layers of kind {', '.join(kinds)}, which are not softmax attention over a band of keys: "
            f"a ring knows {', '.join(sorted(known))}{older_release()}"
        )
    if getattr(text, "output_attentions", False) or getattr(config, "output_attentions", False):
        raise ValueError(f"{name}.output_attentions=True asks for weights of attention, which are never made: set it to False")
    if isinstance(kind, type) and not kind._can_set_attn_implementation():  # type: ignore[attr-defined]
        raise ValueError(
            f"{kind.__name__} computes attention in its own code and asks no attn_implementation: it cannot run over a ring"
        )


def _check_stack(config: PreTrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(config).__name__} is of an encoder with a decoder, whose cross attention "
            'attn_implementation="ring" does not know: models of one stack run over a ring'
        )


def check_model(model: nn.Module) -> None:
    warn_if_untried("transformers", not dist.is_initialized() or dist.get_rank() == 0)
    inside = hugging_face_model(model)
    _check_stack(inside.config)
    kinds = {name: type(module).__name__ for name, module in inside.named_modules() if not isinstance(module, PreTrainedModel)}
    linear = mixers(inside)
    related = lambda name: any(f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.") for other in linear)
    unknown = {name: kind for name, kind in kinds.items() if not related(name)}
    found = {name: kind for name, kind in unknown.items() if NOT_SOFTMAX.search(kind) and "Norm" not in kind}
    found = {name: kind for name, kind in found.items() if not any(other.startswith(f"{name}.") for other in found)}
    found |= {name: kind for name, kind in unknown.items() if not found and kind == "Conv1d"}
    if found:
        name, kind = next(iter(found.items()))
        raise ValueError(
            f"{type(inside).__name__} mixes tokens by {', '.join(dict.fromkeys(found.values()))} ({name} for one), which is not "
            f"softmax attention: a ring would compute {kind} within each rank's shard, so it is refused"
            + (older_release() if re.search("mamba|delta|shortconv", f"{name} {kind}", re.IGNORECASE) else "")
        )
    for kind in dict.fromkeys(kinds.values()):
        if kind in OWN_MASKS:
            raise ValueError(
                f"{type(inside).__name__} does not run over a ring: {kind} {OWN_MASKS[kind]}, tokens times tokens, and a ring "
                "knows masks that are bands and intervals of positions alone. Run it unsharded, with another attn_implementation"
            )
    check_config(inside.config, type(inside))
    if any(getattr(c, "is_prompt_learning", False) for c in _adapters(model)):
        raise ValueError(
            "prompt and prefix tuning put tokens in front of the sequence, which every rank would do to its shard: use LoRA"
        )


def check_entry(model: nn.Module, ring: CallRing, device: str) -> None:
    check_model(model)
    inside = hugging_face_model(model)
    check_mixers(inside, ring)
    if any(ROW_HEADS.search(kind.__name__) for kind in type(inside).__mro__):
        raise ValueError(f"the loss of {type(inside).__name__} is not a sum over tokens, and its head {row_head_remedy(model)}")
    check_device(ring.backend, device)


def row_head_remedy(model: nn.Module) -> str:
    under = type(hugging_face_model(model).base_model).__name__
    called = "model.get_base_model().base_model" if _adapters(model) else "model.base_model"
    return (
        "answers once a row, from tokens that one rank of a ring holds. Run what is under it: with "
        f"sequence_parallel({called}, gather_logits=True) {under} returns last_hidden_state whole on every rank; apply "
        "the head and the loss to that, divide the loss by the ranks of the ring, and after backward call sum_gradients(model)"
    )


def _adapters(model: nn.Module) -> list[Any]:
    configs = getattr(model, "peft_config", {})
    return list(configs.values()) if isinstance(configs, dict) else []


def own_positions(model: PreTrainedModel) -> bool:
    """Return True if position_ids that are not passed count from 0: with rotary embeddings, and in hybrid models without any."""
    return any("Rotary" in type(module).__name__ for module in model.modules()) or bool(mixers(model))


def check_cacheable(model: PreTrainedModel) -> None:
    name, text = type(model).__name__, model.config.get_text_config()
    why = None
    if mixers(model) and (objection := cache_objection(model)):
        why = objection
    elif "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        why = "some of its layers see chunks, which a step of decoding does not know"
    elif getattr(text, "num_kv_shared_layers", 0):
        why = "some of its layers read the keys of others"
    elif model.base_model is model or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        why = "it takes no logits_to_keep, and of a long prompt only the last logits are computed"
    if why is not None:
        raise ValueError(
            f"{name} keeps no cache over a ring, for {why}: generate outside of sequence_parallel, after "
            'model.set_attn_implementation("sdpa")'
        )


def device_of(model: nn.Module) -> str:
    """Return the type of the device on which the model computes: "cpu" only if all weights, or DTensors' meshes, are on CPUs."""
    kinds = {p.device_mesh.device_type if is_dtensor(p) else p.device.type for p in model.parameters()}
    return "cpu" if kinds == {"cpu"} else next(iter(kinds - {"cpu"}), "cpu")


def check_device(backend: str, device: str) -> None:
    backends.check_backend(backend)
    if device != "cpu" or backend == "auto":
        return
    heads = (1, 1, 1, 64)
    problem = Problem(
        heads, heads, heads, ("bfloat16", "bfloat16", "bfloat16"), device, 1, Options(backend=backend), framework="torch"
    )
    try:
        backends.select(problem, backend)
    except ValueError as error:
        raise ValueError(
            f'backend={backend!r} is for models on a GPU, and this one is on a CPU: move it first, with model.to("cuda"), or '
            f"leave backend out of enable. {error}"
        ) from None


def layers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder and encoder layers by name, none nested: checkpointing ones, or a ModuleList of as many."""
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(module, GradientCheckpointingLayer):
            found[name] = module
        elif isinstance(module, nn.ModuleList) and len(module) == depth:
            found |= {f"{name}.{i}": layer for i, layer in enumerate(module)}
    return found


class MixingLayers:
    """Hooks on the layers of ``model``, unless compiled, for its first forward: they find layers that mix tokens themselves."""

    def __init__(self, model: nn.Module, inside: PreTrainedModel) -> None:
        self.inside, self.again, self.later = inside, False, False
        self.names: list[str] = []
        self.handles: list[Any] = []
        if not any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules()):
            for name, layer in layers_of(inside).items():
                self._watch(name, layer)

    def _watch(self, name: str, layer: nn.Module) -> None:
        """Register hooks that record ``name`` if a forward of ``layer`` mixes tokens without a call of ring attention."""
        before: list[int | None] = []
        count = lambda: None if (call := running()) is None else call.attention_calls

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (self.again or torch.compiler.is_compiling()) and running() is not None:
                before.append(count())

        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.again and before and before.pop() == count() and self._mixes(layer, args, kwargs):
                self.names.append(f"{name} ({type(layer).__name__})")

        self.handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self.handles.append(layer.register_forward_hook(leave, with_kwargs=True))

    def _mixes(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if NaN in two input tokens of ``layer`` spreads to other output tokens, or if this cannot be tested."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim < 2:
            return True
        self.later = (tokens := hidden.shape[-2]) < 3 and bool(mixers(self.inside))  # a known hybrid is judged by a longer call
        if tokens < 3:
            return not self.later
        spoilt = torch.zeros(tokens, dtype=torch.bool, device=hidden.device)
        spoilt[[tokens // 3, tokens // 2]] = True
        hidden = hidden.detach().masked_fill(spoilt[:, None], float("nan"))
        args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})
        modes = {module: module.training for module in layer.modules()}
        self.again = True
        try:
            with torch.no_grad():
                output = layer.eval()(*args, **kwargs)
            result = output if isinstance(output, Tensor) else output[0]
            return result.shape != hidden.shape or bool(result[..., ~spoilt, :].isnan().any())
        except Exception:  # any error that NaN causes in a layer
            return True
        finally:
            self.again = False
            for module, training in modes.items():
                module.training = training

    def forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def end(self) -> None:
        """Remove the hooks, unless a longer call must judge. Raise ValueError, with up to three names, if layers mix tokens."""
        if self.names or not self.later:
            self.forget()
        if self.names:
            some = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
            raise ValueError(
                f"{type(self.inside).__name__} has layers that mix tokens and never call attn_implementation, {some}: each rank "
                "would compute them within its shard, so the model does not run over a ring. Run it unsharded"
            )


def check_launched() -> None:
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    from torch.distributed.elastic.utils.api import get_env_variable_or_raise

    ranks = int(get_env_variable_or_raise("WORLD_SIZE"))
    if ranks > 1:
        raise ValueError(
            f"torchrun has started {ranks} processes, and this one is connected with no other, so each would compute "
            'the whole sequence by itself: call torch.distributed.init_process_group("nccl") first, on CPUs with "gloo"'
        )
