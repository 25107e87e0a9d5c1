"""The operators, with their Python signatures. All checks are in the library, so C++ and Python report alike."""

import torch
from torch import Tensor

from . import _func
from ._calls import call, plain

_ops = torch.ops.gka

State = tuple[Tensor, Tensor]


def _ridge(ridge: float | Tensor) -> dict[str, float | Tensor]:
    return {"ridge_diagonal": ridge} if isinstance(ridge, Tensor) else {"ridge": ridge}


def _pair(state: State | None, operator: str) -> tuple[Tensor | None, Tensor | None]:
    """(h, u). A layer's state has more fields and would otherwise pass for an empty one."""
    if state is None:
        return None, None
    if isinstance(state, tuple | list) and len(state) == 2 and all(isinstance(part, Tensor) for part in state):
        return state[0], state[1]
    kind = type(state).__name__
    got = f"{kind} of {len(state)}" if isinstance(state, tuple | list) else f"one of type {kind}"
    raise TypeError(f"{operator}: initial_state takes (h, u), two tensors, got {got}")


def _state(state: State | None, operator: str) -> dict[str, Tensor | None]:
    h, u = _pair(state, operator)
    return {"h0": h, "u0": u}


def gated_kalmanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    scale: float = 1.0,
    ridge: float | Tensor = 0.02,
    iterations: int = 30,
    solver: str = "chebyshev",
    gradient: str = "implicit",
    ridge_mode: str = "adaptive",
    ridge_gradient: bool = True,
    decay_keys: bool = True,
    refine: bool = True,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """The memory layer: writes every token, and answers every query from all tokens up to its own.

    Differentiable once, in every tensor argument but ``cu_seqlens``.

    Args:
        q: queries [B, T, H, D], D from 1 to 256, in float64, float32, bfloat16 or float16. Unit norm is usual, not
            required.
        k: keys, as q, or with fewer heads whose number divides H: neighbouring heads of q then share one, and nothing
            is copied.
        v: values [B, T, H, V], V from 1 to 256, in the type of q; or with fewer heads, as for k.
        log_decay: log γ ≤ 0 [B, T, H], the type of q or float32; -inf forgets everything before the token. Left out:
            0, no forgetting.
        beta: how strongly each token is written, ≥ 0 [B, T, H]. Left out: 1.
        alpha: how much of the answer goes through the solve [B, T, H]. Left out: 1, all of it.
        scale: factor on the output.
        ridge: a in λ_t = a‖H_t‖_F; with ``ridge_mode="constant"`` λ itself, where a tensor [H, D] gives each head and
            key channel its own (solvers conjugate_gradient and exact).
        iterations: steps of the solver.
        solver: chebyshev, conjugate_gradient, gradient_descent, nesterov or exact.
        gradient: implicit (one more solve) or unrolled (through every step).
        ridge_mode: adaptive or constant.
        ridge_gradient: whether the gradient goes through λ.
        decay_keys: False: log_decay fades U only.
        refine: False: low-precision kernels take plain Chebyshev steps. The CPU's kernels compute in float32 or better
            and always do.
        initial_state: (h, u), [N, H, D, D] and [N, H, D, V] in float32 (float64 for float64 inputs); h counts as its
            symmetric part. N is B or the number of packed sequences. Left out: zero.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: packed sequences: B is 1, and sequence n is the tokens cu_seqlens[n] to cu_seqlens[n+1] - 1. int32
            or int64 [N+1], from 0 to T, never decreasing.

    Returns:
        o [B, T, H, V] in the type of q, and (h, u) or None.

    Raises:
        ValueError, TypeError: one sentence that names the argument, what it takes and what it got.
    """
    if _func.active():
        h0, u0 = _pair(initial_state, "gated_kalmanet")
        number, diagonal = (0.02, ridge) if isinstance(ridge, Tensor) else (ridge, None)
        tensors = (q, k, v, log_decay, beta, alpha, h0, u0, diagonal, cu_seqlens)
        choices = (solver, gradient, ridge_mode, ridge_gradient, decay_keys, refine)
        o, h, u = _func.memory("both", tensors, (scale, number, iterations, *choices), output_final_state)
        return o, (h, u) if output_final_state else None
    o, h, u = call(
        _ops.gated_kalmanet,
        q,
        k,
        v,
        log_decay,
        beta,
        alpha,
        scale=scale,
        **_ridge(ridge),
        iterations=iterations,
        solver=solver,
        gradient=gradient,
        ridge_mode=ridge_mode,
        ridge_gradient=ridge_gradient,
        decay_keys=decay_keys,
        refine=refine,
        **_state(initial_state, "gated_kalmanet"),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o, (h, u) if output_final_state else None


def gated_kalmanet_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    state: State,
    state_indices: Tensor | None = None,
    scale: float = 1.0,
    ridge: float | Tensor = 0.02,
    iterations: int | Tensor = 30,
    solver: str = "chebyshev",
    ridge_mode: str = "adaptive",
    decay_keys: bool = True,
    refine: bool = True,
    certainty: Tensor | None = None,
) -> Tensor:
    """One token for each of B sequences, for decoding. The state is updated in place; there is no gradient.

    Args:
        q, k, v, log_decay, beta, alpha: as in :func:`gated_kalmanet`, without the token dimension: [B, H, D],
            [B, H, V] and [B, H].
        state: (h, u), [N, H, D, D] and [N, H, D, V], contiguous. N is B, or more: a pool.
        state_indices: int32 or int64 [B], distinct: which slot of the state each sequence has. Left out: sequence b
            has slot b.
        iterations: a number for all sequences, or an int32 tensor [B].
        scale, ridge, solver, ridge_mode, decay_keys, refine: as in :func:`gated_kalmanet`.
        certainty: float64 [B, H], which is written: what :func:`gated_kalmanet_certainty` returns, for this token.

    Returns:
        o [B, H, V] in the type of q.
    """
    # A step on a GPU is over in 14 µs; torch takes most of one for each keyword, and more for isinstance(…, Tensor).
    options = {}
    if state_indices is not None:
        options["state_indices"] = state_indices
    if scale != 1.0:
        options["scale"] = scale
    if type(ridge) is not float or ridge != 0.02:
        options |= _ridge(ridge)
    if type(iterations) is not int or iterations != 30:
        options["iterations_per_sequence" if isinstance(iterations, Tensor) else "iterations"] = iterations
    if solver != "chebyshev":
        options["solver"] = solver
    if ridge_mode != "adaptive":
        options["ridge_mode"] = ridge_mode
    if not decay_keys:
        options["decay_keys"] = False
    if not refine:
        options["refine"] = False
    if certainty is not None:
        options["certainty"] = certainty
    try:
        return _ops.gated_kalmanet_step(q, k, v, log_decay, beta, alpha, h=state[0], u=state[1], **options)
    except RuntimeError as error:
        raise plain(error) from None


def gated_kalmanet_certainty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    scale: float = 1.0,
    ridge: float | Tensor = 0.02,
    iterations: int = 30,
    solver: str = "chebyshev",
    ridge_mode: str = "adaptive",
    decay_keys: bool = True,
    refine: bool = True,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None, Tensor]:
    """:func:`gated_kalmanet` for inference, which also says how much the memory knew of each query. No gradient.

    Returns:
        o and the state as there, and the certainty, float64 [B, T, H]: the share of q_t that lies in what was written,
        q_tᵀ H_t x_t/‖q_t‖² = 1 − λ_t q_t·x_t/‖q_t‖²; 0 where nothing is remembered.
    """
    o, h, u, certainty = call(
        _ops.gated_kalmanet_certainty,
        q,
        k,
        v,
        log_decay,
        beta,
        alpha,
        scale=scale,
        **_ridge(ridge),
        iterations=iterations,
        solver=solver,
        ridge_mode=ridge_mode,
        decay_keys=decay_keys,
        refine=refine,
        **_state(initial_state, "gated_kalmanet_certainty"),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o, (h, u) if output_final_state else None, certainty


def gated_kalmanet_report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    scale: float = 1.0,
    ridge: float | Tensor = 0.02,
    iterations: int = 30,
    solver: str = "chebyshev",
    gradient: str = "implicit",
    ridge_mode: str = "adaptive",
    ridge_gradient: bool = True,
    decay_keys: bool = True,
    refine: bool = True,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor]:
    """How well each solve inside :func:`gated_kalmanet` converged, for the same arguments. No gradient.

    Returns:
        float64 tensors [B, T, H]: ``norm`` ‖H_t‖_F; ``ridge`` λ_t (of a diagonal: its mean); ``residual``
        ‖(H_t + λ_t I) x_t − q_t‖; ``true_residual`` ‖H_t x_t − q_t‖; ``variance`` q_t · x_t, how little the memory
        knows about this query; and ``x`` [B, T, H, D].
    """
    names = ("norm", "ridge", "residual", "true_residual", "variance", "x")
    values = call(
        _ops.gated_kalmanet_report,
        q,
        k,
        v,
        log_decay,
        beta,
        alpha,
        scale=scale,
        **_ridge(ridge),
        iterations=iterations,
        solver=solver,
        gradient=gradient,
        ridge_mode=ridge_mode,
        ridge_gradient=ridge_gradient,
        decay_keys=decay_keys,
        refine=refine,
        **_state(initial_state, "gated_kalmanet_report"),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return dict(zip(names, values, strict=True))


def ridge_solve(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    ridge: float | Tensor = 0.02,
    iterations: int = 30,
    solver: str = "chebyshev",
    gradient: str = "implicit",
    ridge_mode: str = "adaptive",
    ridge_gradient: bool = True,
    refine: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The H half of :func:`gated_kalmanet` alone: x_t = solve(H_t + λ_t I, q_t).

    Takes the same arguments; the state is h alone. For keys that do not fade, leave out ``log_decay``.

    Returns:
        x [B, T, H, D] in the type of q, and h or None.
    """
    if _func.active():
        number, diagonal = (0.02, ridge) if isinstance(ridge, Tensor) else (ridge, None)
        tensors = (q, k, None, log_decay, beta, None, initial_state, None, diagonal, cu_seqlens)
        choices = (solver, gradient, ridge_mode, ridge_gradient, True, refine)
        x, h, _ = _func.memory("solve", tensors, (1.0, number, iterations, *choices), output_final_state)
        return x, h if output_final_state else None
    x, h = call(
        _ops.ridge_solve,
        q,
        k,
        log_decay,
        beta,
        **_ridge(ridge),
        iterations=iterations,
        solver=solver,
        gradient=gradient,
        ridge_mode=ridge_mode,
        ridge_gradient=ridge_gradient,
        refine=refine,
        h0=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return x, h if output_final_state else None


def linear_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The U half of :func:`gated_kalmanet` alone: o_t = scale · U_tᵀ q_t, gated linear attention.

    Takes the same arguments; the state is u alone.

    Returns:
        o [B, T, H, V] in the type of q, and u or None.
    """
    if _func.active():
        tensors = (q, k, v, log_decay, beta, None, None, initial_state, None, cu_seqlens)
        choices = ("chebyshev", "implicit", "adaptive", True, True, True)
        o, _, u = _func.memory("memory", tensors, (scale, 0.02, 0, *choices), output_final_state)
        return o, u if output_final_state else None
    o, u = call(
        _ops.linear_memory,
        q,
        k,
        v,
        log_decay,
        beta,
        scale=scale,
        u0=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o, u if output_final_state else None
