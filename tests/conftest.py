"""Settings of all tests: strict numbers, the same random examples on every rank."""

import hypothesis
import jax

pytest_plugins = ["spmd"]

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every rank must draw the same examples and stop after the same one: nothing random, nothing
# remembered from an earlier run, nothing that looks at the clock. Shrinking does, so it is off.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
    report_multiple_bugs=False,
)
hypothesis.settings.load_profile("ranks")
