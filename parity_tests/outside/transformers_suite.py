"""transformers' common tests of models, of an sdist or a checkout, for tiny decoders: "ring" where they ask for "sdpa"."""

from __future__ import annotations

import functools
import importlib
import sys
import unittest
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ring_attn_torch.transformers import sequence_parallel

from .in_torch import join
from .one import SETTINGS, in_place

FAMILIES = "llama", "mistral", "qwen3", "granite", "phi3", "olmo2", "cohere", "gpt_neox"
SMALL = {
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
ROWS, TOKENS = 7, 13


def import_tests() -> Any:
    """Import the common tests. An sdist lacks two modules of mixins that they inherit from."""
    for name, mixin in {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}.items():
        if not (SETTINGS.source / "tests" / f"{name.replace('.', '/')}.py").is_file():
            sys.modules[f"tests.{name}"] = module = ModuleType(name)
            setattr(module, mixin, type(mixin, (), {}))
    sys.path.insert(0, str(SETTINGS.source))
    return importlib.import_module("tests.test_modeling_common")


def over_ring(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs a model with "ring" inside sequence_parallel, and joins the hidden states of all ranks."""
    inside = False

    @functools.wraps(theirs)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal inside
        if inside or self.config._attn_implementation != "ring":
            return theirs(self, *arguments, **keywords)
        inside, as_tuple = True, keywords.pop("return_dict", None) is False
        try:
            with sequence_parallel(self, gather_logits=True):
                out = in_place(self, *arguments, **keywords)
        finally:
            inside = False
        if getattr(out, "hidden_states", None) is not None:
            out.hidden_states = tuple(join(x, 1, keywords["input_ids"].shape[1]) for x in out.hidden_states)
        return out.to_tuple() if as_tuple else out

    return forward


def load(theirs: Any) -> Any:
    """Return a from_pretrained that reads the first rank's folder: save_pretrained writes on the first rank alone."""

    def from_pretrained(cls: Any, pretrained_model_name_or_path: str, attn_implementation: str = "sdpa", **keywords: Any) -> Any:
        folder = [pretrained_model_name_or_path]
        dist.broadcast_object_list(folder)
        ours = "ring" if attn_implementation == "sdpa" else attn_implementation
        model = theirs(cls, folder[0], attn_implementation=ours, **keywords)
        dist.barrier()
        return model

    return classmethod(from_pretrained)


def inputs(family: str) -> Callable[[], Any]:
    def prepare() -> tuple[Any, dict[str, torch.Tensor]]:
        config = AutoConfig.for_model(family, **SMALL, attn_implementation="ring")
        ids = torch.randint(3, SMALL["vocab_size"], (ROWS, TOKENS))
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return prepare


tests = import_tests()
PreTrainedModel.from_pretrained = load(PreTrainedModel.from_pretrained.__func__)
for family in FAMILIES:
    model_class: Any = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
    model_class.forward = over_ring(model_class.forward)
    tester = SimpleNamespace(
        prepare_config_and_inputs_for_common=inputs(family), is_training=True, batch_size=ROWS, seq_length=TOKENS
    )
    members = {"model_tester": tester, "all_model_classes": (model_class,), "is_encoder_decoder": False}
    globals()[f"{family}_test"] = type(f"{family}_test", (tests.ModelTesterMixin, unittest.TestCase), members)
del tests
