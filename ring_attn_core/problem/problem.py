"""A call of ``ring_attention`` as plain data: options, shapes, dtypes and device, with the checks that combine them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from ..plan.balanced_layout import BalancedLayout
from ..plan.ring import RingPlan
from ..records import hash_once
from .auto import choose
from .checks import DTYPES, OptionalArray, check_array, check_shapes
from .options import Options
from .strategies import IN_GLOBAL_ORDER, Strategy, check_device, check_fit, plan_of_steps, resolve_strategy


@hash_once
@dataclass(frozen=True)
class Problem:
    """One call of ``ring_attention`` on one rank, as hashable data without arrays.

    Shapes describe the rank's shards: q ``[batch, seq_local, heads, head_dim]``, k ``[batch, kv_local, kv_heads, head_dim]``, v
    ``[batch, kv_local, kv_heads, v_dim]`` (perhaps columns of k). ``capability``: compute capability of the NVIDIA GPU, such as
    90, or 0 without one. ``tma``: the framework can launch kernels with TMA descriptors. ``traced_layout``: the layout is a
    TracedLayout of JAX. ``within_documents``: the extents of all ranks are known to stay within the documents that a balanced
    layout was made for.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtypes: tuple[str, str, str]
    device: str
    ranks: int
    options: Options = field(default_factory=Options)
    arrays: tuple[OptionalArray, ...] = ()
    capability: int = 0
    framework: str = "jax"
    tma: bool = True
    traced_layout: bool = False
    within_documents: bool = False

    @cached_property
    def plan(self) -> RingPlan:
        """Return the plan of this problem. Raise ValueError as ``RingPlan`` does, such as if lengths do not fit the layout."""
        options = self.options
        lengths: Any = {"length": options.length, "kv_length": options.kv_length}  # None asks for the default
        tokens = self.q_shape[1], self.k_shape[1]
        return RingPlan(options.layout, options.mask, self.ranks, *tokens, **lengths, steps=options.steps)

    @cached_property
    def steps(self) -> RingPlan:
        """Return the plan of the chosen strategy's steps, made by ``plan_of_steps``."""
        return plan_of_steps(self.travel, self.plan, self.q_shape[2], self.k_shape[2], self.has("extents"))

    @cached_property
    def within(self) -> Problem | None:
        """Return this problem with ``within_documents``, or None if this does not change the strategy of "auto"."""
        if self.options.strategy != "auto" or not isinstance(self.options.layout, BalancedLayout) or not self.has("extents"):
            return None
        self.check()
        problem = replace(self, within_documents=True)
        return problem if problem.travel != self.travel else None

    @cached_property
    def ordinary(self) -> Problem:
        """Return this problem with the values as a separate array v, because every backward reads such an array."""
        options = self.options
        return replace(self, options=replace(options, v_dim=None)) if options.values_in_keys else self

    @cached_property
    def strategy(self) -> str:
        """Return the name of the strategy that runs this problem: "ring" if no keys travel, else the name of ``travel``."""
        return resolve_strategy(self.travel, self.plan)

    @cached_property
    def travel(self) -> Strategy:
        """Return the strategy, a name or record: the option ``strategy``, or for "auto" that of ``choose`` without reach."""
        if self.options.order == "global":
            return IN_GLOBAL_ORDER
        return choose(self).strategy if self.options.strategy == "auto" else self.options.strategy

    @cached_property
    def reaching(self) -> Problem | None:
        """Return this problem with the strategy of "auto" on GPUs with reach, or None if reach does not change the strategy."""
        if self.options.strategy != "auto" or self.options.order == "global" or self.ranks == 1:
            return None
        self.check()
        strategy = choose(self, reach=True).strategy
        return None if strategy == self.travel else replace(self, options=replace(self.options, strategy=strategy))

    def has(self, *names: str) -> bool:
        """Return whether the call has an optional array of one of these names."""
        return any(array.name in names for array in self.arrays)

    @cached_property
    def scale(self) -> float:
        """Return the factor by which q . k is multiplied: the option ``scale``, or ``head_dim ** -0.5`` if it is None."""
        return self.q_shape[-1] ** -0.5 if self.options.scale is None else float(self.options.scale)

    def check(self) -> RingPlan:
        """Check shapes, dtypes, optional arrays, dropout and strategy, and return the plan."""
        check_shapes(self.q_shape, self.k_shape, self.v_shape, "seq_local", "kv_local")
        self._check_dtypes()
        for array in self.arrays:
            check_array(array, self.q_shape, self.k_shape)
        rate = self.options.dropout_rate
        if rate and "dropout_seed" not in {array.name for array in self.arrays}:
            raise ValueError(
                f"dropout_rate={rate} needs dropout_seed, an integer that is the same on every rank and another at every step"
            )
        check_device(self.options.strategy, self.framework, self.device)
        check_fit(self.travel, self.ranks, self.q_shape[2], self.k_shape[2])
        self._check_tree()
        return self.plan

    @property
    def blanks(self) -> bool:
        """Return whether some query, padding included, may be fully masked."""
        return self.steps.blanks or self.has("extents", "key_extents", "key_mask")

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks of a ring, by name, ready for JSON."""
        own = asdict(self)
        del own["within_documents"]  # not a property of the call: ranks agree on it afterwards
        options: dict[str, Any] = own.pop("options") | {"layout": str(self.options.layout)}
        lengths = {"length": self.plan.length, "kv_length": self.plan.kv_length}
        return own | options | lengths | {"scale": self.scale, "strategy": str(self.options.strategy)}

    def _check_tree(self) -> None:
        layout = self.plan.layout
        if isinstance(layout, BalancedLayout) and layout.tree and not self.has("key_extents"):
            raise ValueError(
                "this balanced layout was made for prefix trees, and without key_extents their branches see each other: pass "
                "key_extents=shard.key_extents, and longest_path=shard.longest_path to a layer or model"
            )

    def _check_dtypes(self) -> None:
        if len(set(self.dtypes)) > 1:
            raise ValueError(f"q, k and v must have one dtype, got {', '.join(self.dtypes)}: cast them to the same")
        if self.dtypes[0] not in DTYPES:
            raise ValueError(f"q, k and v must be one of {', '.join(DTYPES)}, got {self.dtypes[0]}: cast them first")
