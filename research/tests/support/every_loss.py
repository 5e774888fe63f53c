"""Every loss of research as a learner takes it, with keys at which its bounds act on the cases of tests."""

from heterorl_research.losses.kinds import (
    CppoConfig,
    DppoConfig,
    DsGepoConfig,
    GepoQuantileConfig,
    GepoTemperedConfig,
    GspoTokenConfig,
    MaxrlConfig,
    MinproConfig,
    OaplConfig,
    PnpoConfig,
    TbaConfig,
    TrmConfig,
    TurnGspoConfig,
    VcpoConfig,
)

CONFIGS = {
    "gepo_quantile": GepoQuantileConfig(),
    "gepo_tempered": GepoTemperedConfig(tempering_ess=0.9),
    "ds_gepo": DsGepoConfig(defensive_fraction=0.2),
    "gspo_token": GspoTokenConfig(),
    "vcpo": VcpoConfig(cap=1.2),
    "tba": TbaConfig(beta=0.1),
    "oapl": OaplConfig(value_beta=0.5, policy_beta=0.3),
    "trm-max": TrmConfig(max_kl=0.1, mean_kl=0.0),
    "trm-mean": TrmConfig(max_kl=0.0, mean_kl=0.05),
    "trm-both": TrmConfig(max_kl=0.15, mean_kl=0.05),
    "pnpo": PnpoConfig(cap=1.05),
    "minpro": MinproConfig(cap=1.05),
    "cppo": CppoConfig(delta=0.1, budget=0.01),
    "dppo-tv": DppoConfig(divergence="tv", mask_low=0.06, mask_high=0.04, square_coefficient=0.05),
    "dppo-kl": DppoConfig(divergence="kl", mask_low=0.02, mask_high=0.01, square_coefficient=0.05),
    "maxrl": MaxrlConfig(),
    "turn_gspo": TurnGspoConfig(eps_low=0.05, eps_high=0.05),
}
LOSSES = {name: config.learner_loss() for name, config in CONFIGS.items()}
