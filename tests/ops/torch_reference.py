"""The operator, one token at a time, in float64 torch: a second opinion on the C++ reference and on every gradient.

Autograd through it gives the unrolled gradient of every solver. With ``gradient="implicit"`` the solve is
differentiated by the implicit function theorem, the transposed system being solved by the same r iterations.
"""

from itertools import pairwise

import torch


def _multiply(matrix, x):
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _iterate(matrix, q, steps, momenta, look_ahead=False):
    """ξ_i = y − c_i (A z − q), y = ξ_{i-1} + m_i (ξ_{i-1} − ξ_{i-2}), z = y or ξ_{i-1}."""
    before, x = torch.zeros_like(q), steps[0] * q
    for step, momentum in zip(steps[1:], momenta[1:], strict=True):
        y = x + momentum * (x - before)
        before, x = x, y - step * (_multiply(matrix, y if look_ahead else x) - q)
    return x


def _chebyshev(matrix, q, mu, big_l, iterations):
    rho = (big_l - mu) / (big_l + mu)
    omega = [torch.full_like(rho, 2.0)]
    for _ in range(iterations):
        omega.append(4 / (4 - rho**2 * omega[-1]))
    first = 2 / (big_l + mu)
    return _iterate(matrix, q, [first] + [first * w for w in omega[1:]], [w - 1 for w in omega])


def _gradient_descent(matrix, q, mu, big_l, iterations):
    return _iterate(matrix, q, [2 / (big_l + mu)] * (iterations + 1), [0.0] * (iterations + 1))


def _nesterov(matrix, q, mu, big_l, iterations):
    root = (3 * big_l / mu + 1).sqrt()
    steps = [2 / (big_l + mu)] + [4 / (3 * big_l + mu)] * iterations
    momenta = [0.0, 0.0] + [(root - 2) / (root + 2)] * iterations
    return _iterate(matrix, q, steps, momenta[: iterations + 1], look_ahead=True)


def _conjugate_gradient(matrix, q, mu, big_l, iterations):
    x, residual, direction = torch.zeros_like(q), q, q
    energy = (residual * residual).sum(-1, keepdim=True)
    for _ in range(iterations):
        image = _multiply(matrix, direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        going = (energy > 0) & (curvature > 0)
        length = torch.where(going, energy / torch.where(going, curvature, 1.0), 0.0)
        x, residual = x + length * direction, residual - length * image
        fresh = (residual * residual).sum(-1, keepdim=True)
        direction = residual + torch.where(going, fresh / torch.where(going, energy, 1.0), 0.0) * direction
        energy = fresh
    return x


def _exact(matrix, q, mu, big_l, iterations):
    return torch.linalg.solve(matrix, q.unsqueeze(-1)).squeeze(-1)


SOLVERS = {
    "chebyshev": _chebyshev,
    "conjugate_gradient": _conjugate_gradient,
    "gradient_descent": _gradient_descent,
    "nesterov": _nesterov,
    "exact": _exact,
}


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix, q, mu, big_l, iterations, solver):
        x = SOLVERS[solver](matrix, q, mu, big_l, iterations)
        ctx.save_for_backward(matrix, x, mu, big_l)
        ctx.rest = iterations, solver
        return x

    @staticmethod
    def backward(ctx, dx):
        matrix, x, mu, big_l = ctx.saved_tensors
        iterations, solver = ctx.rest
        y = SOLVERS[solver](matrix, dx, mu, big_l, iterations)
        outer = y.unsqueeze(-1) * x.unsqueeze(-2)
        return -(outer + outer.mT) / 2, y, None, None, None, None


def solve(h, q, *, ridge, iterations, solver, ridge_mode, ridge_gradient, gradient):
    """x and λ for one token: h [H,D,D], q [H,D]. An empty memory answers zero."""
    norm = h.flatten(-2).norm(dim=-1)
    empty = norm == 0
    seen = norm if ridge_gradient else norm.detach()
    if ridge_mode == "adaptive":
        lam = (ridge * seen).unsqueeze(-1).expand_as(q)
        full = torch.where(empty[:, None, None], torch.eye(q.shape[-1], dtype=h.dtype), h + torch.diag_embed(lam))
        mu, big_l = ridge * torch.where(empty, 1.0, seen), (1 + ridge) * torch.where(empty, 1.0, seen)
    else:
        lam = torch.as_tensor(ridge, dtype=h.dtype).expand_as(q)
        full = h + torch.diag_embed(lam)
        mu, big_l = lam.amin(-1), seen + lam.amax(-1)
    mu, big_l = mu.unsqueeze(-1), big_l.unsqueeze(-1)
    if gradient == "implicit":
        x = _Implicit.apply(full, q, mu, big_l, iterations, solver)
    else:
        x = SOLVERS[solver](full, q, mu, big_l, iterations)
    if ridge_mode == "adaptive":
        x = torch.where(empty.unsqueeze(-1), 0.0, x)
    return x, lam


def gated_kalmanet(
    q,
    k,
    v,
    log_decay=None,
    beta=None,
    alpha=None,
    *,
    scale=1.0,
    ridge=0.02,
    iterations=30,
    solver="chebyshev",
    gradient="implicit",
    ridge_mode="adaptive",
    ridge_gradient=True,
    decay_keys=True,
    initial_state=None,
    cu_seqlens=None,
):
    """o [B,T,H,V] and (h, u), all float64."""
    q, k, v = q.double(), k.double(), v.double()
    batch, tokens, heads, key_dim = q.shape
    ones = torch.ones(batch, tokens, heads, dtype=torch.float64)
    gamma = ones if log_decay is None else log_decay.double().exp()
    beta = ones if beta is None else beta.double()
    alpha = ones if alpha is None else alpha.double()
    if cu_seqlens is None:
        spans = [(row, 0, tokens) for row in range(batch)]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(0, begin, end) for begin, end in pairwise(bounds)]
    options = {
        "ridge": ridge.double() if isinstance(ridge, torch.Tensor) else ridge,
        "iterations": iterations,
        "solver": solver,
        "ridge_mode": ridge_mode,
        "ridge_gradient": ridge_gradient,
        "gradient": gradient,
    }
    rows, final_h, final_u = {}, [], []
    for n, (row, begin, end) in enumerate(spans):
        if initial_state is None:
            h = torch.zeros(heads, key_dim, key_dim, dtype=torch.float64)
            u = torch.zeros(heads, key_dim, v.shape[-1], dtype=torch.float64)
        else:
            h, u = (state[n].double() for state in initial_state)
            h = (h + h.mT) / 2
        for t in range(begin, end):
            q_t, k_t, v_t = q[row, t], k[row, t], v[row, t]
            g, b, a = (gate[row, t].unsqueeze(-1) for gate in (gamma, beta, alpha))
            written = (b * k_t).unsqueeze(-1)
            # where, not a product: what is forgotten does not return as 0 · inf.
            h = (torch.where(g[..., None] == 0, 0.0, g[..., None] * h) if decay_keys else h) + written * k_t[:, None]
            u = torch.where(g[..., None] == 0, 0.0, g[..., None] * u) + written * v_t.unsqueeze(-2)
            x, _ = solve(h, q_t, **options)
            rows[row, t] = scale * _multiply(u.mT, q_t + a * (x - q_t))
        final_h.append(h)
        final_u.append(u)
    shape = (batch, tokens, heads, v.shape[-1])
    answers = [rows[i, t] for i in range(batch) for t in range(tokens)]
    o = torch.stack(answers).reshape(shape) if answers else v.new_zeros(shape)
    return o, (torch.stack(final_h), torch.stack(final_u))
