"""Stand-in: output that reaches the host late; until then its arrays hold nonsense."""

import numpy as np


class Late:
    """An event that is past ``lag`` passes later; nobody may wait for it."""

    def __init__(self, clock, lag, arrive):
        self.clock, self.due, self.arrive = clock, clock.now + lag, arrive

    def query(self):
        if self.clock.now < self.due:
            return False
        if self.arrive is not None:
            self.arrive()
            self.arrive = None
        return True

    def synchronize(self):
        raise AssertionError("somebody waits for the device")


class AsyncOutput:
    def __init__(
        self, model_runner_output, sampler_output, num_sampled_tokens, main_stream, copy_stream
    ):
        self.model_runner_output = model_runner_output
        tokens, sampled = sampler_output.numpy(), num_sampled_tokens.numpy()
        self.sampled_token_ids = np.full_like(tokens, -99)
        self.num_sampled_tokens_np = np.full_like(sampled, -99)

        def arrive():
            self.sampled_token_ids[:] = tokens
            self.num_sampled_tokens_np[:] = sampled

        self.copy_event = Late(main_stream, copy_stream, arrive)
