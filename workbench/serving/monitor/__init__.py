"""A server watched through its page of metrics: samples, recorded and replayed."""
