"""Eviction policies behind one interface; ``policy`` has the interface, the names and the parameters."""

from kvbm_console.core.eviction.auto import LrfuAuto
from kvbm_console.core.eviction.learned import Learned
from kvbm_console.core.eviction.policy import PolicyConfig, TierPolicy
from kvbm_console.core.eviction.ranked import AdaptiveLru, FrequencyBased, Lfu, Lrfu
from kvbm_console.core.eviction.request_lru import RequestLru
from kvbm_console.core.eviction.simple_lru import SimpleLru


def make_policy(config: PolicyConfig, capacity: int) -> TierPolicy:
    """The policy that a configuration names, empty, for a pool of ``capacity`` places."""
    if config.by_request:
        return RequestLru()
    if config.policy == "simple_lru":
        return SimpleLru()
    if config.policy == "lfu":
        return Lfu(capacity)
    if config.policy == "frequency_based":
        return FrequencyBased(capacity)
    if config.policy == "adaptive_lru":
        return AdaptiveLru(capacity, config.frequency_weight, config.frequency_credit_s)
    if config.policy == "lrfu":
        return Lrfu(capacity, config.half_life_s)
    if config.policy == "lrfu_auto":
        return LrfuAuto(capacity)
    return Learned(capacity)
