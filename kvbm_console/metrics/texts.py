"""Every metric with its help text, which says what a bad value means.

A metric whose name ends in ``_total`` is a counter, every other a gauge.

Law of this file: a metric that is not here does not exist, and a metric that is here is always exposed.
"""

from typing import Final

HELP: Final[dict[str, str]] = {
    "kvbm_tier_capacity_blocks": "Capacity of a tier; missing where the engine does not tell. A fall is a lost engine.",
    "kvbm_tier_blocks":
        "Places of a tier by condition. Referenced near capacity: nothing can be evicted; writing or quarantined "
        "that stays high: copies do not end.",
    "kvbm_tier_resident_blocks":
        "Blocks that have a place in a tier. A host tier that is full while its hits stay flat does not pay back.",
    "kvbm_tier_uncertain":
        "1 when reports of an engine were lost or unclear: the tier's counts may be wrong until it restarts.",
    "kvbm_tier_resident_bytes":
        "Bytes of the blocks that have a place in a tier; missing where the size of a block is unknown "
        "(--kv-geometry). Near the memory of the tier: it is full.",
    "kvbm_evicted_blocks_total":
        "Blocks that lost their place in a tier; missing where only an event stream tells of it. Growing as fast as "
        "stores: the tier is too small for its work.",
    "kvbm_policy_evicted_blocks_total":
        "Evicted blocks by the rule that decided. recency: the policy chose as recency alone would have; frequency: "
        "it chose others; reassigned: the engine reused the place. Growing frequency with a falling hit rate: the "
        "policy chooses badly for this load.",
    "kvbm_prompt_blocks_total":
        "Prompt blocks of first admissions: the denominator of every hit rate, as in vLLM's own metrics. Flat while "
        "requests arrive: nothing is admitted.",
    "kvbm_readmitted_prompt_blocks_total":
        "Prompt blocks of admissions after a preemption, which no hit rate counts. Growing: the device is too small "
        "for the requests that run at once.",
    "kvbm_readmitted_hit_blocks_total":
        "Of kvbm_readmitted_prompt_blocks_total, those found in any tier: mostly what the request had computed itself. "
        "The rest is computed once more.",
    "kvbm_hit_blocks_total":
        "Prompt blocks found in a tier, those of kvbm_lost_hit_blocks_total included. A falling share of "
        "kvbm_prompt_blocks_total: prefixes are evicted before they are used again.",
    "kvbm_matched_tokens_total":
        "Tokens found in a tier, the same hits in tokens; absent where engines have blocks of several sizes. A falling "
        "rate: more prefill has to be computed.",
    "kvbm_lost_hit_blocks_total":
        "Hits of a tier taken back because their load failed. Anything above 0: look at the tier that failed.",
    "kvbm_thrash_blocks_total":
        "Blocks that came back by a copy up within kvbm_thrash_window_seconds after the tier had evicted them; per "
        "kvbm_evicted_blocks_total the share of thrash. Growing: the tier is too small for this reuse.",
    "kvbm_thrash_window_seconds":
        "A block that comes back this soon after its eviction counts as thrash (serve --thrash-window). Far above "
        "the time of an answer: waits of users count as thrash.",
    "kvbm_asked_again_blocks_total":
        "Prompt blocks of admissions that the tier had evicted at most so many seconds before (le, cumulative as of "
        "a histogram). Blocks below a time would have been found if the tier had kept blocks for that long.",
    "kvbm_lru_hit_ratio":
        "Estimated share of the prompt blocks that one LRU cache finds: as large as the nearer tiers and this one at "
        "so many times its present capacity. Missing before the first admission, and where a capacity is not known. "
        "Far above at capacity 2 than at 1: the tier is too small.",
    "kvbm_lru_hit_ratio_error":
        "kvbm_lru_hit_ratio is right within this in 19 of 20 cases; 0 while all blocks are followed. Not far below a "
        "gain of hit ratio: the gain may be chance.",
    "kvbm_policy_offload_threshold":
        "Copying down starts when the safe share falls below 1 minus this; 0 copies every block, 1 never begins "
        "before the pool is full.",
    "kvbm_policy_offload_hysteresis":
        "Safe share above the threshold that ends the copying down; 0 makes it start and stop all the time.",
    "kvbm_policy_entries":
        "Blocks that the policy of a tier ranks. Above the capacity of the tier: a bug, please report it.",
    "kvbm_policy_ghosts":
        "Evicted blocks that the policy remembers; missing for policies without history. Near "
        "kvbm_policy_ghosts_max: older history is forgotten, which is normal on long runs.",
    "kvbm_policy_ghosts_max":
        "Most evicted blocks that the policy remembers, about 310 bytes each. Above the free memory: name another "
        "policy.",
    "kvbm_policy_half_life_seconds":
        "Half-life that lrfu_auto has chosen, 0 for pure recency; missing while it counts uses while resident. "
        "Changing all the time: no rule fits the load.",
    "kvbm_policy_frequency_weight":
        "Weight of frequency of the rule that lrfu_auto has chosen; missing while it follows a half-life. High with "
        "a falling hit rate: popular blocks of the past fill the tier.",
    "kvbm_policy_changes_total":
        "How often lrfu_auto has changed its rule. Growing fast: no rule fits the load for long.",
    "kvbm_policy_guarded_blocks":
        "Blocks that a pin or a priority keeps from eviction. Near half of the capacity: the oldest guards give way.",
    "kvbm_pinned_hit_blocks_total":
        "Prompt blocks of admissions found in a tier while they were pinned there (--pin-tail-tokens). Per "
        "kvbm_prompt_blocks_total the hit rate of pinned blocks. Flat with many guarded blocks: pins keep blocks "
        "that no request asks for.",
    "kvbm_policy_not_admitted_blocks_total":
        "Blocks that were used too rarely to be written to a tier (--disk-admission). Growing as fast as copies: the "
        "bound keeps the tier empty.",
    "kvbm_prefetch_fetched_blocks_total":
        "Blocks that a predictor has copied from disk to host memory; missing where nothing is prefetched. Growing "
        "faster than kvbm_prefetch_used_blocks_total: wrong guesses.",
    "kvbm_prefetch_used_blocks_total":
        "Prefetched blocks that a lookup has found in host memory. Flat while blocks are fetched: wrong guesses.",
    "kvbm_prefetch_late_blocks_total":
        "Blocks that a lookup has found on disk while they were on their way. Growing: predictions come too late.",
    "kvbm_prefetch_disk_blocks_total":
        "Blocks that lookups have found on disk, the late ones included. Growing faster than "
        "kvbm_prefetch_used_blocks_total: little is predicted.",
    "kvbm_prefetch_evicted_blocks_total":
        "Prefetched blocks that host memory gave up before a lookup found them. Growing: copies that were for "
        "nothing.",
    "kvbm_prefetch_limits_total":
        "Times that prefetch was limited to probes, because less than a quarter of the fetched blocks were used. "
        "Growing: guesses swing between good and useless.",
    "kvbm_prefetch_limited":
        "1 while prefetch is limited to probes. For long: the host tier is too small to keep the blocks until "
        "any request asks for it, or the predictor does not fit the load.",
    "kvbm_prefetch_wasted_bytes_total":
        "Bytes of kvbm_prefetch_evicted_blocks_total; missing where the size of a block is unknown. Growing: "
        "bandwidth that is lost to wrong guesses.",
    "kvbm_prefetch_precision_ratio":
        "Share of the fetched blocks that were used, since the start; missing before the first. Not high: prefetch "
        "costs more than it gives; use --prefetch none.",
    "kvbm_prefetch_coverage_ratio":
        "Share of the blocks that lookups had from disk which were in host memory by then. Not high: little is "
        "predicted.",
    "kvbm_prefetch_timeliness_ratio":
        "Share of the needed predictions that had arrived when a lookup came. Not high: predictions come too late.",
    "kvbm_moved_blocks_total":
        "Blocks copied from source to target tier. Down without up: offload that never pays back.",
    "kvbm_moved_bytes_total":
        "Bytes copied from source to target tier; missing where the size of a block is unknown. Near the bandwidth "
        "of a link: copies queue.",
    "kvbm_candidate_blocks":
        "Blocks of planned transfers that have not ended. Growing without end: the mover or the pipeline stands "
        "still.",
    "kvbm_oldest_candidate_seconds":
        "Age of the oldest planned transfer of a route. Above some seconds: it is held, or its copy hangs.",
    "kvbm_candidates_ended_total":
        "Planned transfers by how they ended. Any failed or many cancelled: copies are lost.",
    "kvbm_candidates_skipped_total":
        "Planned transfers that came to no work, by reason. Many no_capacity: the target tier is full of blocks "
        "that cannot be evicted. Many link_busy: the link to the target is too slow.",
    "kvbm_slots":
        "Live requests by state. Many onboarding or preempted: requests wait for blocks; finishing that stays: "
        "blocks are not given back.",
    "kvbm_oldest_slot_seconds":
        "How long the oldest request has been in its state. Above the time of a request: it hangs.",
    "kvbm_requests_finished_total":
        "Requests by how they ended. Growing aborted, error or too_large: clients give up or do not fit.",
    "kvbm_preemptions_total":
        "Requests whose device blocks were taken back. Growing: the device tier is too small for the batch.",
    "kvbm_holds": "Requests that a debugger keeps waiting now. Above 0 in production: a person is debugging.",
    "kvbm_oldest_hold_seconds": "Age of the oldest hold. Near 120: it is about to be ended by force.",
    "kvbm_holds_total": "Holds since the start. Growing unasked: a breakpoint was left behind.",
    "kvbm_holds_ended_total":
        "Holds by how they ended. Expired, lease_lost or pressure: the debugger went away or was in the way.",
    "kvbm_holds_denied_total": "Holds refused because too many stood already. Growing: a breakpoint is too wide.",
    "kvbm_breakpoint_hits_total": "Breakpoint hits. Thousands a second: give it a condition.",
    "kvbm_stream_batches_total":
        "Batches taken from a publisher. Flat while the engine works: its events are off or the network drops them.",
    "kvbm_stream_stored_blocks_total": "Blocks reported as stored. Flat while batches come: nothing new is cached.",
    "kvbm_stream_removed_blocks_total": "Blocks reported as removed. As fast as stored: the cache only turns over.",
    "kvbm_stream_lost_batches_total":
        "Batches that never came, replay included. Anything above 0 makes counts uncertain: raise the engine's hwm "
        "or buffer_steps.",
    "kvbm_stream_replayed_batches_total": "Batches that came by replay. Growing: the live stream loses messages.",
    "kvbm_stream_restarts_total":
        "New incarnations of a publisher. Growing: the engine crashes or two engines share an address.",
    "kvbm_stream_unknown_events_total":
        "Events of kinds that this version does not know. Growing: the engine is newer; update this program.",
    "kvbm_stream_malformed_events_total":
        "Events that could not be read. Above 0: counts are uncertain; report the engine's version.",
    "kvbm_stream_bad_payloads_total":
        "Messages that could not be read at all. Above 0: another program publishes at this address.",
    "kvbm_stream_refused_blocks_total": "Blocks beyond this program's limits. Above 0: counts are too low.",
    "kvbm_stream_connected": "1 while a publisher is connected. 0: the engine is down or unreachable.",
    "kvbm_stream_last_batch_age_seconds":
        "Lag: time since the last batch; missing before the first. Engines send only when they step, so high is bad "
        "only while requests run.",
    "kvbm_stream_uncertain":
        "1 when reports of this publisher were lost since it was last known whole: its counts may be wrong.",
    "kvbm_stream_ended": "1 when the engine of a publisher is gone. Its blocks are gone, too.",
    "kvbm_engine_capacity_blocks":
        "Blocks that the engine's device can hold, from its own metrics; missing if unknown. A fall is a restart.",
    "kvbm_engine_used_ratio":
        "Share of the device's blocks that live requests use, from the engine's own metrics. Near 1: requests wait or "
        "are preempted.",
    "kvbm_engine_running": "Requests that the engine runs, from its own metrics. 0: it is idle or stuck.",
    "kvbm_engine_running_most": "Most requests that run at once, by the engine's settings. Near it: others wait.",
    "kvbm_engine_step_tokens_most": "Most tokens that a step computes, by its settings. High: prompts delay answers.",
    "kvbm_engine_retention_tokens":
        "Tokens between the windows that groups of layers with an attention window keep cached. 0: at ends of prompts.",
    "kvbm_engine_waiting": "Requests that wait in the engine, from its own metrics. Growing: it is overloaded.",
    "kvbm_engine_preemptions_total":
        "Preemptions, from the engine's own metrics. Growing: its blocks do not suffice for the running requests.",
    "kvbm_engine_query_tokens_total": "Prompt tokens that the engine looked up on its device. Flat: no prompt comes.",
    "kvbm_engine_hit_tokens_total":
        "Prompt tokens that the engine found there. Falling per kvbm_engine_query_tokens_total: prefixes are lost.",
    "kvbm_engine_below_query_tokens_total":
        "Prompt tokens that the engine looked up below its device. Flat: no lower tier.",
    "kvbm_engine_below_hit_tokens_total": "Prompt tokens that the engine found there. 0: the lower tier does not pay.",
    "kvbm_engine_first_token_seconds":
        "Mean time to the first token over the last minute, from the engine's own metrics. Growing: requests queue.",
    "kvbm_engine_scrape_failures_total":
        "Failed readings of the engine's own metrics. Growing: the engine is down, or serves no metrics.",
    "kvbm_stream_again_blocks_total":
        "Blocks that were stored again after their eviction. Near the stored blocks: the tier is too small.",
    "kvbm_stream_block_lifetime_seconds":
        "Time between a block's store and its eviction, by quantile. Far below the time between the turns of a "
        "session: the tier is too small.",
    "kvbm_tap_calls_total":
        "Connector calls of a watched engine that its tap has seen. Flat while requests run: the engine hangs.",
    "kvbm_tap_dropped_total":
        "Records that a tap had to drop because the daemon is too slow. Growing: the facts of that engine have gaps.",
    "kvbm_tap_errors_total":
        "Errors of a tap that were swallowed. Any: it does not fit this engine; after 100 it is off.",
    "kvbm_tap_call_seconds_total":
        "Time of the engine's own thread spent in its tap. Above 2 % of kvbm_tap_step_seconds_total: too much.",
    "kvbm_tap_steps_total": "Steps that a watched engine has formed. Flat while requests wait: the engine hangs.",
    "kvbm_tap_step_seconds_total":
        "Time between the steps of a watched engine. Growing faster than kvbm_tap_steps_total: steps become slower.",
    "kvbm_tap_audited_places_total":
        "Places of an engine's pool that were compared with the facts. Flat while requests run: no audit takes place.",
    "kvbm_tap_differing_places_total":
        "Places in which an engine's pool and the facts differed. Any: counts were wrong until the next whole report.",
    "kvbm_sanitize_checked_blocks_total":
        "Blocks whose bytes were compared at the end of a store or before a model read them. Flat under load: the "
        "sample is too small.",
    "kvbm_sanitize_mismatched_blocks_total":
        "Blocks that held other bytes than a store had taken. Any: answers may be wrong; the log says which copy.",
    "kvbm_sanitize_unknown_blocks_total":
        "Sampled blocks that were loaded without a known store. Growing: another engine or an older run stored them.",
    "kvbm_sanitize_check_seconds_total":
        "Time of an engine's workers spent in comparing. Above 3 % of kvbm_tap_step_seconds_total: sample less.",
    "kvbm_connector_calls_total":
        "Calls of a watched engine into its KV connector. Flat while requests run: the engine hangs.",
    "kvbm_connector_call_seconds_total":
        "Time of a watched engine's scheduler inside its connector's calls. A rate near 1: the connector blocks the "
        "engine.",
    "kvbm_connector_longest_call_seconds":
        "The longest call since the engine began. Above a few steps: the connector has blocked the engine.",
    "kvbm_connector_figure":
        "A figure of the connector's own statistics, under its own name. A figure of failures above 0: read the "
        "connector's log.",
    "kvbm_recorder_state": "1 at the recorder's state. Degraded: events are lost to the recording; look at the disk.",
    "kvbm_recorder_written_seq":
        "The last event that a killed process cannot take any more. Falling behind kvbm_stream_head_seq: the disk is "
        "slow.",
    "kvbm_recorder_synced_seq":
        "The last event that a power loss cannot take any more. Far behind written: syncs are slow.",
    "kvbm_recorder_synced_age_seconds":
        "How long ago all that was written was also synced. Above a few seconds: the disk is slow.",
    "kvbm_recorder_not_recorded_total": "Events that had to be left out of the recording. Above 0: it has gaps.",
    "kvbm_questions_refused_total":
        "Questions of clients that were refused because too many waited. Growing: a client floods the daemon.",
    "kvbm_part_healthy":
        "1 while a task or thread of the daemon runs. 0: it ended and could not be restarted; read the daemon's log.",
    "kvbm_part_ended_total":
        "How often a task or thread of the daemon ended without being asked to. Above 0: report the daemon's log.",
    "kvbm_stream_head_seq": "Number of the newest event. Flat while requests run: the leader gets no reports.",
    "kvbm_subscribers": "Consoles and other readers of the stream. Many of them: each costs bandwidth.",
    "kvbm_ring_bytes":
        "Bytes of history in memory. At its limit it is full, which is normal; 0 while events come is not.",
    "kvbm_stimuli_rejected_total": "Reports that did not fit the state. Growing: an engine and its connector disagree.",
    "kvbm_completions_refused_total":
        "Completions that match no open copy. Growing: a mover reports twice or too late.",
    "kvbm_invariant_violations_total":
        "Bugs of this program that were undone. Anything above 0: please report it with the recording.",
    "kvbm_process_cpu_seconds_total": "Processor time of the daemon: its own cost. A rate near 1: it cannot keep up.",
    "kvbm_process_memory_peak_bytes": "Most memory that the daemon has held. Growing without end: a leak.",
    "kvbm_otlp_spans_total":
        "Spans of request timelines: ended, and of these exported or failed; missing without --otlp. Failed that "
        "grows: the collector does not take them. Ended ahead of both by more than 16,384: they are dropped.",
    "kvbm_lint_active":
        "Problems that a lint finds now, of the last minute where they are of an instant; doctor names and explains "
        "them. Above 0: a problem needs a person.",
    "kvbm_lint_passed_over_events_total":
        "Events that lints and curve did not look at, because they may take an eighth of a core. Growing: "
        "kvbm_lint_active may miss short problems, and kvbm_lru_hit_ratio is that of the other events.",
    "kvbm_scrape_seconds": "Time that this scrape took on the daemon's thread; above 0.05 it delays engines.",
}
