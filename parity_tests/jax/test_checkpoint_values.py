"""Values of a checkpoint in JAX besides parameters: numbers, texts, empty arrays, and states that optax has promoted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ring_attn_jax import Checkpoints, to_numpy

from ..support.selection import first
from .ring import mesh_of

pytest.importorskip("orbax.checkpoint")


class Holder(nnx.Module):
    """A module with the variables that a test gives it."""

    def __init__(self, **variables: Any) -> None:
        for name, x in variables.items():
            setattr(self, name, x)

    if TYPE_CHECKING:
        map: Any
        number: Any
        w: Any
        x: Any
        y: Any


def resumed(folder: Path, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Save ``one``, a model and perhaps its optimizer, and resume from it with ``other``."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, *one)
    assert checkpoints.resume(*other) is not None
    checkpoints.close()


def assert_same(one: Any, other: Any) -> None:
    """Assert that types, dtypes, shapes and bits are equal."""
    leaves = [jax.tree_util.tree_leaves_with_path([nnx.state(each) for each in both]) for both in (one, other)]
    for (path, x), (_, y) in zip(*leaves, strict=True):
        name = jax.tree_util.keystr(path)
        assert type(x) is type(y), name
        assert getattr(x, "weak_type", None) == getattr(y, "weak_type", None), name
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name, strict=True)


def test_two_names_that_join_alike_are_refused(tmp_path):
    tree = lambda: {"a.b": nnx.Param(jnp.ones(2)), "a": {"b": nnx.Param(10 * jnp.ones(2))}}
    model = Holder(tree=nnx.data(tree()))
    with pytest.raises(ValueError, match=r"two entries are called 'model\.tree\.a\.b': rename one"):
        Checkpoints(tmp_path / "run").save(1, model)
    with pytest.raises(ValueError, match=r"two entries are called 'tree\.a\.b'"):
        to_numpy(model)
    with pytest.raises(ValueError, match=r"two entries are called 'weight'"):
        to_numpy(Holder(kernel=nnx.Param(jnp.ones((2, 2))), weight=nnx.Param(jnp.ones((2, 2)))))
    assert not (tmp_path / "run").exists()


VALUES: dict[str, tuple[Any, Any]] = {
    "int": (3, 4),
    "float": (0.1, float("inf")),
    "bool": (True, False),
    "text": ("one", "other"),
    "dict": ({"a": jnp.ones(2), "b": (2, "x")}, {"a": jnp.zeros(2), "b": (3, "y")}),
    "numpy": (np.ones(2), np.zeros(2)),
    "empty": (jnp.zeros((0, 3)), jnp.zeros((0, 3))),
    "float8": (jnp.ones(2, jnp.float8_e4m3fn), jnp.zeros(2, jnp.float8_e4m3fn)),
    "complex": (jnp.ones(2, jnp.complex64), jnp.zeros(2, jnp.complex64)),
    "weak": (jnp.asarray(0.1), jnp.asarray(0.2)),
    "nothing": (None, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_value_of_a_variable_comes_back_in_its_type(name: str, tmp_path):
    one, other = (Holder(x=nnx.Variable(x), w=nnx.Param(jnp.full(2, i, jnp.float32))) for i, x in enumerate(VALUES[name]))
    resumed(tmp_path, (one,), (other,))
    assert_same((one,), (other,))


def test_resume_commits_no_array_that_was_uncommitted(tmp_path):
    def model(seed: int) -> Holder:
        return Holder(
            w=nnx.Param(jnp.full(2, seed, jnp.float32)), weak=nnx.Variable(jnp.asarray(0.1 * seed)),
            empty=nnx.Variable(jnp.zeros((0, 3))), rngs=nnx.Rngs(seed),
        )  # fmt: skip

    one, other = model(1), model(2)
    resumed(tmp_path, (one,), (other,))
    assert not any(x.committed for x in jax.tree.leaves(nnx.state(other)))
    x = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh_of(2), jax.P("seq")))
    assert len(nnx.jit(lambda model, x: model.w * x)(other, x).sharding.device_set) == 2


def test_a_numpy_scalar_comes_back_as_an_array(tmp_path):
    one, other = (Holder(x=nnx.Variable(np.float32(x)), w=nnx.Param(jnp.ones(2))) for x in (0.1, 0.2))
    resumed(tmp_path, (one,), (other,))
    np.testing.assert_array_equal(other.x.get_value(), np.float32(0.1), strict=True)


def test_a_complex_number_comes_back(tmp_path):
    one, other = (Holder(x=nnx.Variable(jnp.asarray(x)), w=nnx.Param(jnp.ones(2))) for x in (1j, 2j))
    resumed(tmp_path, (one,), (other,))
    assert other.x.get_value() == 1j


def test_arrays_of_size_0_and_weakly_typed_numbers_come_back_on_their_mesh(tmp_path):
    everywhere = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P())
    holder = lambda x: Holder(
        number=nnx.Variable(jax.device_put(jnp.asarray(x), everywhere)),
        empty=nnx.Variable(jax.device_put(jnp.zeros((0, 3)), everywhere)),
        w=nnx.Param(jax.device_put(jnp.full(2, x, jnp.float32), everywhere)),
    )
    one, other = holder(0.1), holder(0.2)
    assert one.number.get_value().weak_type
    resumed(tmp_path, (one,), (other,))
    assert_same((one,), (other,))
    assert {len(x.devices()) for x in jax.tree.leaves(nnx.state(other))} == {2}


def test_a_save_works_inside_an_event_loop(tmp_path):
    """As in a notebook, whose cells run inside one."""

    async def cell() -> None:
        resumed(tmp_path, (Holder(w=nnx.Param(jnp.ones(2))),), (other,))

    other = Holder(w=nnx.Param(jnp.zeros(2)))
    asyncio.run(cell())
    assert other.w.get_value().tolist() == [1, 1]


@pytest.mark.parametrize("x", [1j, b"x", object(), np.array(["x"])], ids=["complex", "bytes", "object", "texts"])
def test_a_value_that_no_checkpoint_can_hold_is_named(x: Any, tmp_path):
    with pytest.raises(ValueError, match=r"model\.x is .*, and a checkpoint holds arrays, numbers and texts: keep it outside"):
        Checkpoints(tmp_path / "run").save(1, Holder(x=nnx.Variable(x)))
    with pytest.raises(ValueError, match=r"model\.w has no values yet: initialise"):
        Checkpoints(tmp_path / "run").save(1, nnx.eval_shape(lambda: Holder(w=nnx.Param(jnp.ones(2)))))
    assert not (tmp_path / "run").exists()


def test_a_number_where_a_text_was_saved_is_refused(tmp_path):
    one, other = (Holder(x=nnx.Variable(x), w=nnx.Param(jnp.ones(2))) for x in ("x", 3))
    with pytest.raises(ValueError, match=r"model\.x is str and must be number"):
        resumed(tmp_path, (one,), (other,))


def test_sown_intermediates_are_not_part_of_a_checkpoint(tmp_path):
    one, other = (Holder(map=nnx.Linear(2, 2, rngs=nnx.Rngs(seed))) for seed in range(2))
    one.y = nnx.Intermediate((jnp.ones(3),))
    resumed(tmp_path, (one,), (other,))
    resumed(tmp_path / "back", (other,), (one,))
    assert_same((one.map,), (other.map,))
    assert one.y.get_value()[0].shape == (3,)


def half(seed: int, transformation: Any) -> tuple[Any, Any]:
    """A model with bfloat16 parameters, and its optimizer."""
    model = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)


@nnx.jit
def train_step(model: Any, optimizer: Any) -> None:
    optimizer.update(model, nnx.grad(lambda model: jnp.square(model(jnp.ones((2, 4)))).mean())(model))


@pytest.mark.parametrize("kind", first(["adamw", "sgd"]))
@pytest.mark.parametrize("rate", [None, 0.037, 1, jnp.float16(0.5)], ids=["as it was", "float", "int", "float16"])
def test_states_that_optax_has_promoted_are_resumed_to_the_bit(kind: str, rate: Any, tmp_path):
    transformation = optax.inject_hyperparams(getattr(optax, kind), hyperparam_dtype=jnp.dtype("float32"))(0.1)
    whole, other = half(0, transformation), half(5, transformation)
    train_step(*whole)
    if rate is not None:
        whole[1].opt_state.hyperparams["learning_rate"].set_value(rate)
        train_step(*whole)
    resumed(tmp_path, whole, other)
    assert_same(whole, other)
    for each in (whole, other):
        train_step(*each)
    assert_same(whole, other)


def test_moments_of_another_optimizers_dtype_are_still_refused(tmp_path):
    one, other = (half(0, optax.adamw(0.1, mu_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    with pytest.raises(ValueError, match=r"opt_state\.0\.mu\.bias is float32 and must be bfloat16"):
        resumed(tmp_path, one, other)
