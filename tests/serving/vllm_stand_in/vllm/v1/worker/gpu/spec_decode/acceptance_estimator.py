"""Stand-in: an estimator whose coefficients change at random every few steps."""

import torch


class OnlineAcceptanceEstimator:
    REFIT_INTERVAL = 5

    def __init__(self, max_num_reqs, num_speculative_steps, device):
        self.slope = torch.full((1,), 0.5)
        self.intercepts = torch.full((num_speculative_steps,), -0.2)
        self._steps_since_refit = 0
        self.generator = torch.Generator().manual_seed(0)

    def step(self, idx_mapping, num_sampled, num_rejected):
        self._steps_since_refit += 1
        if self._steps_since_refit == self.REFIT_INTERVAL:
            self._steps_since_refit = 0
            self.slope += torch.rand(1, generator=self.generator)
            self.intercepts += torch.rand(self.intercepts.shape, generator=self.generator)
