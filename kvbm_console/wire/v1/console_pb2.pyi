from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_OBSERVE: _ClassVar[Role]
    ROLE_CONTROL: _ClassVar[Role]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_MSGPACK: _ClassVar[Encoding]
    ENCODING_PROTOBUF: _ClassVar[Encoding]

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_STATE_INITIALIZED: _ClassVar[SlotState]
    SLOT_STATE_ONBOARD_STAGED: _ClassVar[SlotState]
    SLOT_STATE_ONBOARDING: _ClassVar[SlotState]
    SLOT_STATE_PREFILLING: _ClassVar[SlotState]
    SLOT_STATE_SKIPPED_PREFILL: _ClassVar[SlotState]
    SLOT_STATE_DECODING: _ClassVar[SlotState]
    SLOT_STATE_SKIPPED_DECODE: _ClassVar[SlotState]
    SLOT_STATE_PREEMPTED: _ClassVar[SlotState]
    SLOT_STATE_FINISHING: _ClassVar[SlotState]
    SLOT_STATE_FINISHED: _ClassVar[SlotState]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_G1: _ClassVar[Tier]
    TIER_G2: _ClassVar[Tier]
    TIER_G3: _ClassVar[Tier]
    TIER_G4: _ClassVar[Tier]

class Route(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_UNSPECIFIED: _ClassVar[Route]
    ROUTE_G1_G2: _ClassVar[Route]
    ROUTE_G1_G3: _ClassVar[Route]
    ROUTE_G1_G4: _ClassVar[Route]
    ROUTE_G2_G1: _ClassVar[Route]
    ROUTE_G2_G3: _ClassVar[Route]
    ROUTE_G2_G4: _ClassVar[Route]
    ROUTE_G3_G1: _ClassVar[Route]
    ROUTE_G3_G2: _ClassVar[Route]
    ROUTE_G3_G4: _ClassVar[Route]
    ROUTE_G4_G1: _ClassVar[Route]
    ROUTE_G4_G2: _ClassVar[Route]
    ROUTE_G4_G3: _ClassVar[Route]

class Authority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUTHORITY_LEADER: _ClassVar[Authority]
    AUTHORITY_ENGINE: _ClassVar[Authority]
    AUTHORITY_STREAM: _ClassVar[Authority]
    AUTHORITY_OBSERVED: _ClassVar[Authority]

class CandidateStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANDIDATE_STATUS_PENDING_EVALUATION: _ClassVar[CandidateStatus]
    CANDIDATE_STATUS_PROMOTED: _ClassVar[CandidateStatus]
    CANDIDATE_STATUS_COMPLETED: _ClassVar[CandidateStatus]
    CANDIDATE_STATUS_FAILED: _ClassVar[CandidateStatus]
    CANDIDATE_STATUS_CANCELLED: _ClassVar[CandidateStatus]
    CANDIDATE_STATUS_SKIPPED: _ClassVar[CandidateStatus]

class SkipReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SKIP_REASON_ALREADY_CACHED: _ClassVar[SkipReason]
    SKIP_REASON_NO_CAPACITY: _ClassVar[SkipReason]
    SKIP_REASON_BELOW_FREQUENCY: _ClassVar[SkipReason]
    SKIP_REASON_SOURCE_EVICTED: _ClassVar[SkipReason]
    SKIP_REASON_SLOT_STOPPING: _ClassVar[SkipReason]
    SKIP_REASON_OPERATOR: _ClassVar[SkipReason]
    SKIP_REASON_LINK_BUSY: _ClassVar[SkipReason]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_NONE: _ClassVar[MissReason]
    MISS_REASON_NEVER_STORED: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_NOT_OFFLOADED: _ClassVar[MissReason]
    MISS_REASON_WRITING: _ClassVar[MissReason]
    MISS_REASON_BOUNDARY: _ClassVar[MissReason]
    MISS_REASON_TOO_SHORT: _ClassVar[MissReason]
    MISS_REASON_FILTERED: _ClassVar[MissReason]
    MISS_REASON_UNKNOWN_AFTER_GAP: _ClassVar[MissReason]

class ReleaseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_REASON_FINISHED: _ClassVar[ReleaseReason]
    RELEASE_REASON_PREEMPTED: _ClassVar[ReleaseReason]
    RELEASE_REASON_ALLOCATED: _ClassVar[ReleaseReason]
    RELEASE_REASON_DEADLINE: _ClassVar[ReleaseReason]
    RELEASE_REASON_UNUSED: _ClassVar[ReleaseReason]
    RELEASE_REASON_REASSIGNED: _ClassVar[ReleaseReason]
    RELEASE_REASON_RESET: _ClassVar[ReleaseReason]
    RELEASE_REASON_FAILED: _ClassVar[ReleaseReason]
    RELEASE_REASON_EPOCH: _ClassVar[ReleaseReason]
    RELEASE_REASON_LOADED: _ClassVar[ReleaseReason]
    RELEASE_REASON_PAST_WINDOW: _ClassVar[ReleaseReason]
    RELEASE_REASON_NOT_KEPT: _ClassVar[ReleaseReason]

class EvictRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVICT_RULE_REASSIGNED: _ClassVar[EvictRule]
    EVICT_RULE_RECENCY: _ClassVar[EvictRule]
    EVICT_RULE_STREAM: _ClassVar[EvictRule]
    EVICT_RULE_FREQUENCY: _ClassVar[EvictRule]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_TOO_LARGE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Site(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SITE_TRANSITION_WILL: _ClassVar[Site]
    SITE_TRANSITION_DID: _ClassVar[Site]
    SITE_CANDIDATE_ENQUEUE: _ClassVar[Site]
    SITE_EVALUATE_WILL: _ClassVar[Site]
    SITE_EVALUATE_DID: _ClassVar[Site]
    SITE_PROMOTE_WILL: _ClassVar[Site]
    SITE_SKIP_DID: _ClassVar[Site]
    SITE_DISPATCH_WILL: _ClassVar[Site]
    SITE_COMPLETE_WILL: _ClassVar[Site]
    SITE_EVICT_WILL: _ClassVar[Site]
    SITE_REQUEST_FINISH: _ClassVar[Site]
    SITE_CALL_WILL: _ClassVar[Site]
    SITE_CALL_DID: _ClassVar[Site]

class WaitPoint(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_POINT_LOOKUP: _ClassVar[WaitPoint]
    WAIT_POINT_SCHEDULE: _ClassVar[WaitPoint]
    WAIT_POINT_EVALUATE: _ClassVar[WaitPoint]
    WAIT_POINT_PROMOTE: _ClassVar[WaitPoint]
    WAIT_POINT_DISPATCH: _ClassVar[WaitPoint]
    WAIT_POINT_COMPLETION: _ClassVar[WaitPoint]
    WAIT_POINT_RELEASE: _ClassVar[WaitPoint]
    WAIT_POINT_CALL: _ClassVar[WaitPoint]

class HoldEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_END_CONTINUED: _ClassVar[HoldEnd]
    HOLD_END_STEPPED: _ClassVar[HoldEnd]
    HOLD_END_SKIPPED: _ClassVar[HoldEnd]
    HOLD_END_EXPIRED: _ClassVar[HoldEnd]
    HOLD_END_LEASE_LOST: _ClassVar[HoldEnd]
    HOLD_END_CANCELLED: _ClassVar[HoldEnd]
    HOLD_END_DISARMED: _ClassVar[HoldEnd]
    HOLD_END_PRESSURE: _ClassVar[HoldEnd]
    HOLD_END_SHUTDOWN: _ClassVar[HoldEnd]

class BreakpointAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKPOINT_ACTION_HOLD: _ClassVar[BreakpointAction]
    BREAKPOINT_ACTION_LOG: _ClassVar[BreakpointAction]
    BREAKPOINT_ACTION_SNAPSHOT: _ClassVar[BreakpointAction]
    BREAKPOINT_ACTION_FREEZE: _ClassVar[BreakpointAction]

class Suspend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUSPEND_SLOT: _ClassVar[Suspend]
    SUSPEND_PIPELINE: _ClassVar[Suspend]
    SUSPEND_ALL: _ClassVar[Suspend]

class OnTimeout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_TIMEOUT_CONTINUE: _ClassVar[OnTimeout]
    ON_TIMEOUT_SKIP_CANDIDATE: _ClassVar[OnTimeout]

class BreakpointEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BREAKPOINT_END_FAILED: _ClassVar[BreakpointEnd]
    BREAKPOINT_END_OVERRUN: _ClassVar[BreakpointEnd]
    BREAKPOINT_END_EXPIRED: _ClassVar[BreakpointEnd]

class ResetMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESET_MODE_LOGICAL: _ClassVar[ResetMode]
    RESET_MODE_PHYSICAL: _ClassVar[ResetMode]

class Note(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTE_RECORDER_DEGRADED: _ClassVar[Note]
    NOTE_RECORDER_RESUMED: _ClassVar[Note]
    NOTE_CLOCK_STEPPED: _ClassVar[Note]
    NOTE_LOOP_BLOCKED: _ClassVar[Note]
    NOTE_SHUTTING_DOWN: _ClassVar[Note]
    NOTE_ENGINE_SUMMARY: _ClassVar[Note]
    NOTE_PART_ENDED: _ClassVar[Note]
    NOTE_PART_RESTARTED: _ClassVar[Note]
    NOTE_VERDICT: _ClassVar[Note]

class Measure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEASURE_CAPACITY_BLOCKS: _ClassVar[Measure]
    MEASURE_USED_PPM: _ClassVar[Measure]
    MEASURE_RUNNING: _ClassVar[Measure]
    MEASURE_WAITING: _ClassVar[Measure]
    MEASURE_PREEMPTIONS: _ClassVar[Measure]
    MEASURE_QUERY_TOKENS: _ClassVar[Measure]
    MEASURE_HIT_TOKENS: _ClassVar[Measure]
    MEASURE_BELOW_QUERY_TOKENS: _ClassVar[Measure]
    MEASURE_BELOW_HIT_TOKENS: _ClassVar[Measure]
    MEASURE_FIRST_TOKENS: _ClassVar[Measure]
    MEASURE_FIRST_TOKEN_NS: _ClassVar[Measure]
    MEASURE_RECENT_NS: _ClassVar[Measure]
    MEASURE_RECENT_QUERY_TOKENS: _ClassVar[Measure]
    MEASURE_RECENT_HIT_TOKENS: _ClassVar[Measure]
    MEASURE_RECENT_BELOW_QUERY_TOKENS: _ClassVar[Measure]
    MEASURE_RECENT_BELOW_HIT_TOKENS: _ClassVar[Measure]
    MEASURE_HOST_CAPACITY_BLOCKS: _ClassVar[Measure]
    MEASURE_HOST_USED_BLOCKS: _ClassVar[Measure]
    MEASURE_OFFLOADED_BLOCKS: _ClassVar[Measure]
    MEASURE_ONBOARDED_BLOCKS: _ClassVar[Measure]
    MEASURE_RUNNING_MOST: _ClassVar[Measure]
    MEASURE_STEP_TOKENS_MOST: _ClassVar[Measure]
    MEASURE_RETENTION_TOKENS: _ClassVar[Measure]
ROLE_UNSPECIFIED: Role
ROLE_OBSERVE: Role
ROLE_CONTROL: Role
ENCODING_MSGPACK: Encoding
ENCODING_PROTOBUF: Encoding
SLOT_STATE_INITIALIZED: SlotState
SLOT_STATE_ONBOARD_STAGED: SlotState
SLOT_STATE_ONBOARDING: SlotState
SLOT_STATE_PREFILLING: SlotState
SLOT_STATE_SKIPPED_PREFILL: SlotState
SLOT_STATE_DECODING: SlotState
SLOT_STATE_SKIPPED_DECODE: SlotState
SLOT_STATE_PREEMPTED: SlotState
SLOT_STATE_FINISHING: SlotState
SLOT_STATE_FINISHED: SlotState
TIER_UNSPECIFIED: Tier
TIER_G1: Tier
TIER_G2: Tier
TIER_G3: Tier
TIER_G4: Tier
ROUTE_UNSPECIFIED: Route
ROUTE_G1_G2: Route
ROUTE_G1_G3: Route
ROUTE_G1_G4: Route
ROUTE_G2_G1: Route
ROUTE_G2_G3: Route
ROUTE_G2_G4: Route
ROUTE_G3_G1: Route
ROUTE_G3_G2: Route
ROUTE_G3_G4: Route
ROUTE_G4_G1: Route
ROUTE_G4_G2: Route
ROUTE_G4_G3: Route
AUTHORITY_LEADER: Authority
AUTHORITY_ENGINE: Authority
AUTHORITY_STREAM: Authority
AUTHORITY_OBSERVED: Authority
CANDIDATE_STATUS_PENDING_EVALUATION: CandidateStatus
CANDIDATE_STATUS_PROMOTED: CandidateStatus
CANDIDATE_STATUS_COMPLETED: CandidateStatus
CANDIDATE_STATUS_FAILED: CandidateStatus
CANDIDATE_STATUS_CANCELLED: CandidateStatus
CANDIDATE_STATUS_SKIPPED: CandidateStatus
SKIP_REASON_ALREADY_CACHED: SkipReason
SKIP_REASON_NO_CAPACITY: SkipReason
SKIP_REASON_BELOW_FREQUENCY: SkipReason
SKIP_REASON_SOURCE_EVICTED: SkipReason
SKIP_REASON_SLOT_STOPPING: SkipReason
SKIP_REASON_OPERATOR: SkipReason
SKIP_REASON_LINK_BUSY: SkipReason
MISS_REASON_NONE: MissReason
MISS_REASON_NEVER_STORED: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_NOT_OFFLOADED: MissReason
MISS_REASON_WRITING: MissReason
MISS_REASON_BOUNDARY: MissReason
MISS_REASON_TOO_SHORT: MissReason
MISS_REASON_FILTERED: MissReason
MISS_REASON_UNKNOWN_AFTER_GAP: MissReason
RELEASE_REASON_FINISHED: ReleaseReason
RELEASE_REASON_PREEMPTED: ReleaseReason
RELEASE_REASON_ALLOCATED: ReleaseReason
RELEASE_REASON_DEADLINE: ReleaseReason
RELEASE_REASON_UNUSED: ReleaseReason
RELEASE_REASON_REASSIGNED: ReleaseReason
RELEASE_REASON_RESET: ReleaseReason
RELEASE_REASON_FAILED: ReleaseReason
RELEASE_REASON_EPOCH: ReleaseReason
RELEASE_REASON_LOADED: ReleaseReason
RELEASE_REASON_PAST_WINDOW: ReleaseReason
RELEASE_REASON_NOT_KEPT: ReleaseReason
EVICT_RULE_REASSIGNED: EvictRule
EVICT_RULE_RECENCY: EvictRule
EVICT_RULE_STREAM: EvictRule
EVICT_RULE_FREQUENCY: EvictRule
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_TOO_LARGE: FinishReason
FINISH_REASON_ERROR: FinishReason
SITE_TRANSITION_WILL: Site
SITE_TRANSITION_DID: Site
SITE_CANDIDATE_ENQUEUE: Site
SITE_EVALUATE_WILL: Site
SITE_EVALUATE_DID: Site
SITE_PROMOTE_WILL: Site
SITE_SKIP_DID: Site
SITE_DISPATCH_WILL: Site
SITE_COMPLETE_WILL: Site
SITE_EVICT_WILL: Site
SITE_REQUEST_FINISH: Site
SITE_CALL_WILL: Site
SITE_CALL_DID: Site
WAIT_POINT_LOOKUP: WaitPoint
WAIT_POINT_SCHEDULE: WaitPoint
WAIT_POINT_EVALUATE: WaitPoint
WAIT_POINT_PROMOTE: WaitPoint
WAIT_POINT_DISPATCH: WaitPoint
WAIT_POINT_COMPLETION: WaitPoint
WAIT_POINT_RELEASE: WaitPoint
WAIT_POINT_CALL: WaitPoint
HOLD_END_CONTINUED: HoldEnd
HOLD_END_STEPPED: HoldEnd
HOLD_END_SKIPPED: HoldEnd
HOLD_END_EXPIRED: HoldEnd
HOLD_END_LEASE_LOST: HoldEnd
HOLD_END_CANCELLED: HoldEnd
HOLD_END_DISARMED: HoldEnd
HOLD_END_PRESSURE: HoldEnd
HOLD_END_SHUTDOWN: HoldEnd
BREAKPOINT_ACTION_HOLD: BreakpointAction
BREAKPOINT_ACTION_LOG: BreakpointAction
BREAKPOINT_ACTION_SNAPSHOT: BreakpointAction
BREAKPOINT_ACTION_FREEZE: BreakpointAction
SUSPEND_SLOT: Suspend
SUSPEND_PIPELINE: Suspend
SUSPEND_ALL: Suspend
ON_TIMEOUT_CONTINUE: OnTimeout
ON_TIMEOUT_SKIP_CANDIDATE: OnTimeout
BREAKPOINT_END_FAILED: BreakpointEnd
BREAKPOINT_END_OVERRUN: BreakpointEnd
BREAKPOINT_END_EXPIRED: BreakpointEnd
RESET_MODE_LOGICAL: ResetMode
RESET_MODE_PHYSICAL: ResetMode
NOTE_RECORDER_DEGRADED: Note
NOTE_RECORDER_RESUMED: Note
NOTE_CLOCK_STEPPED: Note
NOTE_LOOP_BLOCKED: Note
NOTE_SHUTTING_DOWN: Note
NOTE_ENGINE_SUMMARY: Note
NOTE_PART_ENDED: Note
NOTE_PART_RESTARTED: Note
NOTE_VERDICT: Note
MEASURE_CAPACITY_BLOCKS: Measure
MEASURE_USED_PPM: Measure
MEASURE_RUNNING: Measure
MEASURE_WAITING: Measure
MEASURE_PREEMPTIONS: Measure
MEASURE_QUERY_TOKENS: Measure
MEASURE_HIT_TOKENS: Measure
MEASURE_BELOW_QUERY_TOKENS: Measure
MEASURE_BELOW_HIT_TOKENS: Measure
MEASURE_FIRST_TOKENS: Measure
MEASURE_FIRST_TOKEN_NS: Measure
MEASURE_RECENT_NS: Measure
MEASURE_RECENT_QUERY_TOKENS: Measure
MEASURE_RECENT_HIT_TOKENS: Measure
MEASURE_RECENT_BELOW_QUERY_TOKENS: Measure
MEASURE_RECENT_BELOW_HIT_TOKENS: Measure
MEASURE_HOST_CAPACITY_BLOCKS: Measure
MEASURE_HOST_USED_BLOCKS: Measure
MEASURE_OFFLOADED_BLOCKS: Measure
MEASURE_ONBOARDED_BLOCKS: Measure
MEASURE_RUNNING_MOST: Measure
MEASURE_STEP_TOKENS_MOST: Measure
MEASURE_RETENTION_TOKENS: Measure
ROLE_FIELD_NUMBER: _ClassVar[int]
role: _descriptor.FieldDescriptor

class Version(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "client")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    protocol: Version
    client: str
    def __init__(self, protocol: _Optional[_Union[Version, _Mapping]] = ..., client: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "program", "incarnation", "run", "role", "limits", "clock_at_ns", "clock_wall_ns", "config_json", "config_digest", "block_bytes", "target")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AT_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_WALL_NS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    protocol: Version
    program: str
    incarnation: str
    run: int
    role: Role
    limits: Limits
    clock_at_ns: int
    clock_wall_ns: int
    config_json: str
    config_digest: int
    block_bytes: int
    target: str
    def __init__(self, protocol: _Optional[_Union[Version, _Mapping]] = ..., program: _Optional[str] = ..., incarnation: _Optional[str] = ..., run: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., clock_at_ns: _Optional[int] = ..., clock_wall_ns: _Optional[int] = ..., config_json: _Optional[str] = ..., config_digest: _Optional[int] = ..., block_bytes: _Optional[int] = ..., target: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("request_id_bytes", "control_message_bytes", "message_bytes", "subscribers", "lease_ttl_ns")
    REQUEST_ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_NS_FIELD_NUMBER: _ClassVar[int]
    request_id_bytes: int
    control_message_bytes: int
    message_bytes: int
    subscribers: int
    lease_ttl_ns: int
    def __init__(self, request_id_bytes: _Optional[int] = ..., control_message_bytes: _Optional[int] = ..., message_bytes: _Optional[int] = ..., subscribers: _Optional[int] = ..., lease_ttl_ns: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("encoding", "after_seq", "incarnation", "digests", "client", "history")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    encoding: Encoding
    after_seq: int
    incarnation: str
    digests: bool
    client: str
    history: bool
    def __init__(self, encoding: _Optional[_Union[Encoding, str]] = ..., after_seq: _Optional[int] = ..., incarnation: _Optional[str] = ..., digests: _Optional[bool] = ..., client: _Optional[str] = ..., history: _Optional[bool] = ...) -> None: ...

class SubscribeReply(_message.Message):
    __slots__ = ("snapshot_begin", "snapshot_part", "snapshot_end", "batch", "gap", "heartbeat", "bye")
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PART_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    snapshot_begin: SnapshotBegin
    snapshot_part: SnapshotPart
    snapshot_end: SnapshotEnd
    batch: EventBatch
    gap: Gap
    heartbeat: Heartbeat
    bye: Bye
    def __init__(self, snapshot_begin: _Optional[_Union[SnapshotBegin, _Mapping]] = ..., snapshot_part: _Optional[_Union[SnapshotPart, _Mapping]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., batch: _Optional[_Union[EventBatch, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class SnapshotBegin(_message.Message):
    __slots__ = ("seq", "at_ns", "total_bytes", "incarnation")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    at_ns: int
    total_bytes: int
    incarnation: str
    def __init__(self, seq: _Optional[int] = ..., at_ns: _Optional[int] = ..., total_bytes: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: int
    def __init__(self, digest: _Optional[int] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("first_seq", "count", "base_ns", "last_ns", "schema_id", "lost_before", "encoding", "payload", "events")
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BASE_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_NS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    LOST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    first_seq: int
    count: int
    base_ns: int
    last_ns: int
    schema_id: int
    lost_before: int
    encoding: Encoding
    payload: bytes
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, first_seq: _Optional[int] = ..., count: _Optional[int] = ..., base_ns: _Optional[int] = ..., last_ns: _Optional[int] = ..., schema_id: _Optional[int] = ..., lost_before: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., payload: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class StimulusBatch(_message.Message):
    __slots__ = ("first_n", "count", "base_ns", "last_ns", "schema_id", "encoding", "payload", "stimuli")
    FIRST_N_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BASE_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_NS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    STIMULI_FIELD_NUMBER: _ClassVar[int]
    first_n: int
    count: int
    base_ns: int
    last_ns: int
    schema_id: int
    encoding: Encoding
    payload: bytes
    stimuli: _containers.RepeatedCompositeFieldContainer[Stimulus]
    def __init__(self, first_n: _Optional[int] = ..., count: _Optional[int] = ..., base_ns: _Optional[int] = ..., last_ns: _Optional[int] = ..., schema_id: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., payload: _Optional[bytes] = ..., stimuli: _Optional[_Iterable[_Union[Stimulus, _Mapping]]] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("first", "last", "count", "reason", "bytes")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    count: int
    reason: str
    bytes: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., count: _Optional[int] = ..., reason: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("head_seq", "at_ns", "recorder", "subscribers", "digest", "warnings")
    HEAD_SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    RECORDER_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    head_seq: int
    at_ns: int
    recorder: RecorderStatus
    subscribers: int
    digest: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, head_seq: _Optional[int] = ..., at_ns: _Optional[int] = ..., recorder: _Optional[_Union[RecorderStatus, _Mapping]] = ..., subscribers: _Optional[int] = ..., digest: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class RecorderStatus(_message.Message):
    __slots__ = ("state", "written_seq", "synced_seq", "synced_age_ns", "not_recorded", "path", "bytes", "segment", "reason", "removed_segments")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_SEQ_FIELD_NUMBER: _ClassVar[int]
    SYNCED_SEQ_FIELD_NUMBER: _ClassVar[int]
    SYNCED_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    NOT_RECORDED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMOVED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    state: str
    written_seq: int
    synced_seq: int
    synced_age_ns: int
    not_recorded: int
    path: str
    bytes: int
    segment: int
    reason: str
    removed_segments: int
    def __init__(self, state: _Optional[str] = ..., written_seq: _Optional[int] = ..., synced_seq: _Optional[int] = ..., synced_age_ns: _Optional[int] = ..., not_recorded: _Optional[int] = ..., path: _Optional[str] = ..., bytes: _Optional[int] = ..., segment: _Optional[int] = ..., reason: _Optional[str] = ..., removed_segments: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("last_seq", "reason")
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    last_seq: int
    reason: str
    def __init__(self, last_seq: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SlotDetailRequest(_message.Message):
    __slots__ = ("slot", "request")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request: str
    def __init__(self, slot: _Optional[int] = ..., request: _Optional[str] = ...) -> None: ...

class SlotDetailReply(_message.Message):
    __slots__ = ("slot_json", "story")
    SLOT_JSON_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    slot_json: str
    story: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, slot_json: _Optional[str] = ..., story: _Optional[_Iterable[str]] = ...) -> None: ...

class QueryRequest(_message.Message):
    __slots__ = ("status", "digest", "history", "summary", "find")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    status: StatusQuery
    digest: DigestQuery
    history: HistoryQuery
    summary: SummaryQuery
    find: FindQuery
    def __init__(self, status: _Optional[_Union[StatusQuery, _Mapping]] = ..., digest: _Optional[_Union[DigestQuery, _Mapping]] = ..., history: _Optional[_Union[HistoryQuery, _Mapping]] = ..., summary: _Optional[_Union[SummaryQuery, _Mapping]] = ..., find: _Optional[_Union[FindQuery, _Mapping]] = ...) -> None: ...

class StatusQuery(_message.Message):
    __slots__ = ("slot_filter",)
    SLOT_FILTER_FIELD_NUMBER: _ClassVar[int]
    slot_filter: str
    def __init__(self, slot_filter: _Optional[str] = ...) -> None: ...

class DigestQuery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HistoryQuery(_message.Message):
    __slots__ = ("first_seq", "limit")
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    first_seq: int
    limit: int
    def __init__(self, first_seq: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class SummaryQuery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindQuery(_message.Message):
    __slots__ = ("hashes", "request")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    request: str
    def __init__(self, hashes: _Optional[_Iterable[int]] = ..., request: _Optional[str] = ...) -> None: ...

class QueryReply(_message.Message):
    __slots__ = ("status_json", "digest", "history", "summary_json", "found_json")
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_JSON_FIELD_NUMBER: _ClassVar[int]
    FOUND_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    digest: DigestReply
    history: HistoryReply
    summary_json: str
    found_json: str
    def __init__(self, status_json: _Optional[str] = ..., digest: _Optional[_Union[DigestReply, _Mapping]] = ..., history: _Optional[_Union[HistoryReply, _Mapping]] = ..., summary_json: _Optional[str] = ..., found_json: _Optional[str] = ...) -> None: ...

class DigestReply(_message.Message):
    __slots__ = ("seq", "digest")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    seq: int
    digest: int
    def __init__(self, seq: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("batches", "oldest_seq")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[EventBatch]
    oldest_seq: int
    def __init__(self, batches: _Optional[_Iterable[_Union[EventBatch, _Mapping]]] = ..., oldest_seq: _Optional[int] = ...) -> None: ...

class RecordingRequest(_message.Message):
    __slots__ = ("start", "stop", "rotate", "status")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ROTATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    start: StartRecording
    stop: StopRecording
    rotate: RotateRecording
    status: RecorderQuery
    def __init__(self, start: _Optional[_Union[StartRecording, _Mapping]] = ..., stop: _Optional[_Union[StopRecording, _Mapping]] = ..., rotate: _Optional[_Union[RotateRecording, _Mapping]] = ..., status: _Optional[_Union[RecorderQuery, _Mapping]] = ...) -> None: ...

class StartRecording(_message.Message):
    __slots__ = ("directory", "segment_bytes", "segment_ns", "keep_bytes", "keep_ns", "sync")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_NS_FIELD_NUMBER: _ClassVar[int]
    KEEP_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEP_NS_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    directory: str
    segment_bytes: int
    segment_ns: int
    keep_bytes: int
    keep_ns: int
    sync: str
    def __init__(self, directory: _Optional[str] = ..., segment_bytes: _Optional[int] = ..., segment_ns: _Optional[int] = ..., keep_bytes: _Optional[int] = ..., keep_ns: _Optional[int] = ..., sync: _Optional[str] = ...) -> None: ...

class StopRecording(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateRecording(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecorderQuery(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordingReply(_message.Message):
    __slots__ = ("recorder",)
    RECORDER_FIELD_NUMBER: _ClassVar[int]
    recorder: RecorderStatus
    def __init__(self, recorder: _Optional[_Union[RecorderStatus, _Mapping]] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("id", "opened", "verdict", "done", "refused", "verdicts", "reset", "drain")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    id: int
    opened: SessionOpened
    verdict: BreakpointVerdict
    done: str
    refused: str
    verdicts: BreakpointVerdicts
    reset: ResetAnswer
    drain: DrainAnswer
    def __init__(self, id: _Optional[int] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., verdict: _Optional[_Union[BreakpointVerdict, _Mapping]] = ..., done: _Optional[str] = ..., refused: _Optional[str] = ..., verdicts: _Optional[_Union[BreakpointVerdicts, _Mapping]] = ..., reset: _Optional[_Union[ResetAnswer, _Mapping]] = ..., drain: _Optional[_Union[DrainAnswer, _Mapping]] = ...) -> None: ...

class ResetAnswer(_message.Message):
    __slots__ = ("epoch", "aborted_requests", "quarantined_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ABORTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    aborted_requests: int
    quarantined_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., aborted_requests: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ...) -> None: ...

class DrainAnswer(_message.Message):
    __slots__ = ("seq", "live_requests")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    live_requests: int
    def __init__(self, seq: _Optional[int] = ..., live_requests: _Optional[int] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("owner", "lease_ttl_ns")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_NS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    lease_ttl_ns: int
    def __init__(self, owner: _Optional[str] = ..., lease_ttl_ns: _Optional[int] = ...) -> None: ...

class BreakpointVerdicts(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[BreakpointVerdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[BreakpointVerdict, _Mapping]]] = ...) -> None: ...

class BreakpointVerdict(_message.Message):
    __slots__ = ("id", "verified", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: int
    verified: bool
    message: str
    def __init__(self, id: _Optional[int] = ..., verified: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class FeedRequest(_message.Message):
    __slots__ = ("open", "batch", "cost", "stopped")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    open: OpenFeed
    batch: StimulusBatch
    cost: FeedCost
    stopped: CopiesStopped
    def __init__(self, open: _Optional[_Union[OpenFeed, _Mapping]] = ..., batch: _Optional[_Union[StimulusBatch, _Mapping]] = ..., cost: _Optional[_Union[FeedCost, _Mapping]] = ..., stopped: _Optional[_Union[CopiesStopped, _Mapping]] = ...) -> None: ...

class CopiesStopped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FeedCost(_message.Message):
    __slots__ = ("calls", "dropped", "call_ns", "steps", "step_ns", "errors", "checked_blocks", "mismatched_blocks", "unknown_blocks", "check_ns", "audited_places", "differing_places")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CALL_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECK_NS_FIELD_NUMBER: _ClassVar[int]
    AUDITED_PLACES_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_PLACES_FIELD_NUMBER: _ClassVar[int]
    calls: int
    dropped: int
    call_ns: int
    steps: int
    step_ns: int
    errors: int
    checked_blocks: int
    mismatched_blocks: int
    unknown_blocks: int
    check_ns: int
    audited_places: int
    differing_places: int
    def __init__(self, calls: _Optional[int] = ..., dropped: _Optional[int] = ..., call_ns: _Optional[int] = ..., steps: _Optional[int] = ..., step_ns: _Optional[int] = ..., errors: _Optional[int] = ..., checked_blocks: _Optional[int] = ..., mismatched_blocks: _Optional[int] = ..., unknown_blocks: _Optional[int] = ..., check_ns: _Optional[int] = ..., audited_places: _Optional[int] = ..., differing_places: _Optional[int] = ...) -> None: ...

class OpenFeed(_message.Message):
    __slots__ = ("name", "moves", "pauses", "points", "process", "process_began", "settled", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_BEGAN_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    moves: bool
    pauses: bool
    points: _containers.RepeatedScalarFieldContainer[WaitPoint]
    process: int
    process_began: int
    settled: bool
    rank: int
    def __init__(self, name: _Optional[str] = ..., moves: _Optional[bool] = ..., pauses: _Optional[bool] = ..., points: _Optional[_Iterable[_Union[WaitPoint, str]]] = ..., process: _Optional[int] = ..., process_began: _Optional[int] = ..., settled: _Optional[bool] = ..., rank: _Optional[int] = ...) -> None: ...

class FeedReply(_message.Message):
    __slots__ = ("opened", "answers", "wake", "release", "clear", "standing", "bye", "start", "cancel", "pin", "pause", "resume", "held", "lookups", "copies", "zero")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    ZERO_FIELD_NUMBER: _ClassVar[int]
    opened: FeedOpened
    answers: Answers
    wake: WakeRequest
    release: ReleaseDeviceBlocks
    clear: ClearDevicePool
    standing: StandingRequests
    bye: Bye
    start: StartTransfer
    cancel: CancelTransfer
    pin: PinDeviceBlocks
    pause: PauseEngine
    resume: ResumeEngine
    held: HeldRequests
    lookups: LookupGlobs
    copies: LookupGlobs
    zero: ZeroBlocks
    def __init__(self, opened: _Optional[_Union[FeedOpened, _Mapping]] = ..., answers: _Optional[_Union[Answers, _Mapping]] = ..., wake: _Optional[_Union[WakeRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseDeviceBlocks, _Mapping]] = ..., clear: _Optional[_Union[ClearDevicePool, _Mapping]] = ..., standing: _Optional[_Union[StandingRequests, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., start: _Optional[_Union[StartTransfer, _Mapping]] = ..., cancel: _Optional[_Union[CancelTransfer, _Mapping]] = ..., pin: _Optional[_Union[PinDeviceBlocks, _Mapping]] = ..., pause: _Optional[_Union[PauseEngine, _Mapping]] = ..., resume: _Optional[_Union[ResumeEngine, _Mapping]] = ..., held: _Optional[_Union[HeldRequests, _Mapping]] = ..., lookups: _Optional[_Union[LookupGlobs, _Mapping]] = ..., copies: _Optional[_Union[LookupGlobs, _Mapping]] = ..., zero: _Optional[_Union[ZeroBlocks, _Mapping]] = ...) -> None: ...

class LookupGlobs(_message.Message):
    __slots__ = ("globs",)
    GLOBS_FIELD_NUMBER: _ClassVar[int]
    globs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, globs: _Optional[_Iterable[str]] = ...) -> None: ...

class FeedOpened(_message.Message):
    __slots__ = ("source", "incarnation")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    source: int
    incarnation: str
    def __init__(self, source: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Answers(_message.Message):
    __slots__ = ("first_n", "answers")
    FIRST_N_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    first_n: int
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, first_n: _Optional[int] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("match", "fenced", "finish", "metadata", "clones", "rejected", "pool", "audit")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CLONES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    match: MatchAnswer
    fenced: FencedBlocks
    finish: FinishAnswer
    metadata: IterationMetadata
    clones: CloneAnswer
    rejected: str
    pool: int
    audit: AuditAnswer
    def __init__(self, match: _Optional[_Union[MatchAnswer, _Mapping]] = ..., fenced: _Optional[_Union[FencedBlocks, _Mapping]] = ..., finish: _Optional[_Union[FinishAnswer, _Mapping]] = ..., metadata: _Optional[_Union[IterationMetadata, _Mapping]] = ..., clones: _Optional[_Union[CloneAnswer, _Mapping]] = ..., rejected: _Optional[str] = ..., pool: _Optional[int] = ..., audit: _Optional[_Union[AuditAnswer, _Mapping]] = ...) -> None: ...

class AuditAnswer(_message.Message):
    __slots__ = ("differing",)
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    differing: int
    def __init__(self, differing: _Optional[int] = ...) -> None: ...

class MatchAnswer(_message.Message):
    __slots__ = ("tokens", "asynchronous")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    asynchronous: bool
    def __init__(self, tokens: _Optional[int] = ..., asynchronous: _Optional[bool] = ...) -> None: ...

class FencedBlocks(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class FinishAnswer(_message.Message):
    __slots__ = ("delay_free",)
    DELAY_FREE_FIELD_NUMBER: _ClassVar[int]
    delay_free: bool
    def __init__(self, delay_free: _Optional[bool] = ...) -> None: ...

class IterationMetadata(_message.Message):
    __slots__ = ("iteration", "operations")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    operations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, iteration: _Optional[int] = ..., operations: _Optional[_Iterable[int]] = ...) -> None: ...

class CloneAnswer(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("request", "computed_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: str
    computed_tokens: int
    def __init__(self, request: _Optional[str] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class ReleaseDeviceBlocks(_message.Message):
    __slots__ = ("request", "ids")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    request: str
    ids: bytes
    def __init__(self, request: _Optional[str] = ..., ids: _Optional[bytes] = ...) -> None: ...

class ClearDevicePool(_message.Message):
    __slots__ = ("keep",)
    KEEP_FIELD_NUMBER: _ClassVar[int]
    keep: bytes
    def __init__(self, keep: _Optional[bytes] = ...) -> None: ...

class StartTransfer(_message.Message):
    __slots__ = ("operation", "epoch", "route", "sources", "targets", "blocks", "batch", "ranks", "source_pool", "target_pool", "hashes")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_POOL_FIELD_NUMBER: _ClassVar[int]
    TARGET_POOL_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    operation: int
    epoch: int
    route: Route
    sources: bytes
    targets: bytes
    blocks: int
    batch: int
    ranks: int
    source_pool: int
    target_pool: int
    hashes: bytes
    def __init__(self, operation: _Optional[int] = ..., epoch: _Optional[int] = ..., route: _Optional[_Union[Route, str]] = ..., sources: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., blocks: _Optional[int] = ..., batch: _Optional[int] = ..., ranks: _Optional[int] = ..., source_pool: _Optional[int] = ..., target_pool: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class CancelTransfer(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: int
    def __init__(self, operation: _Optional[int] = ...) -> None: ...

class ZeroBlocks(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: int
    def __init__(self, pool: _Optional[int] = ...) -> None: ...

class PinDeviceBlocks(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class PauseEngine(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeEngine(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeldRequests(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldRequest]
    def __init__(self, held: _Optional[_Iterable[_Union[HeldRequest, _Mapping]]] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("request", "hold", "site", "max_hold_ns")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
    request: str
    hold: int
    site: Site
    max_hold_ns: int
    def __init__(self, request: _Optional[str] = ..., hold: _Optional[int] = ..., site: _Optional[_Union[Site, str]] = ..., max_hold_ns: _Optional[int] = ...) -> None: ...

class StandingRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[str]] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("id", "open", "renew", "set", "remove", "enable", "continue_hold", "step", "disarm", "step_pipeline", "run_for", "skip", "freeze", "thaw", "replace", "reset", "drain")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    ENABLE_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_HOLD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DISARM_FIELD_NUMBER: _ClassVar[int]
    STEP_PIPELINE_FIELD_NUMBER: _ClassVar[int]
    RUN_FOR_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    THAW_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    id: int
    open: OpenSession
    renew: RenewLease
    set: SetBreakpoint
    remove: RemoveBreakpoint
    enable: EnableBreakpoint
    continue_hold: ContinueHold
    step: StepSlot
    disarm: Disarm
    step_pipeline: StepPipeline
    run_for: RunFor
    skip: SkipCandidate
    freeze: Freeze
    thaw: Thaw
    replace: ReplaceBreakpoints
    reset: Reset
    drain: Drain
    def __init__(self, id: _Optional[int] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., renew: _Optional[_Union[RenewLease, _Mapping]] = ..., set: _Optional[_Union[SetBreakpoint, _Mapping]] = ..., remove: _Optional[_Union[RemoveBreakpoint, _Mapping]] = ..., enable: _Optional[_Union[EnableBreakpoint, _Mapping]] = ..., continue_hold: _Optional[_Union[ContinueHold, _Mapping]] = ..., step: _Optional[_Union[StepSlot, _Mapping]] = ..., disarm: _Optional[_Union[Disarm, _Mapping]] = ..., step_pipeline: _Optional[_Union[StepPipeline, _Mapping]] = ..., run_for: _Optional[_Union[RunFor, _Mapping]] = ..., skip: _Optional[_Union[SkipCandidate, _Mapping]] = ..., freeze: _Optional[_Union[Freeze, _Mapping]] = ..., thaw: _Optional[_Union[Thaw, _Mapping]] = ..., replace: _Optional[_Union[ReplaceBreakpoints, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("name", "lease", "owner")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease: bool
    owner: str
    def __init__(self, name: _Optional[str] = ..., lease: _Optional[bool] = ..., owner: _Optional[str] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetBreakpoint(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: BreakpointSpec
    def __init__(self, spec: _Optional[_Union[BreakpointSpec, _Mapping]] = ...) -> None: ...

class ReplaceBreakpoints(_message.Message):
    __slots__ = ("specs",)
    SPECS_FIELD_NUMBER: _ClassVar[int]
    specs: _containers.RepeatedCompositeFieldContainer[BreakpointSpec]
    def __init__(self, specs: _Optional[_Iterable[_Union[BreakpointSpec, _Mapping]]] = ...) -> None: ...

class RemoveBreakpoint(_message.Message):
    __slots__ = ("breakpoint",)
    BREAKPOINT_FIELD_NUMBER: _ClassVar[int]
    breakpoint: int
    def __init__(self, breakpoint: _Optional[int] = ...) -> None: ...

class EnableBreakpoint(_message.Message):
    __slots__ = ("breakpoint", "enabled")
    BREAKPOINT_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    breakpoint: int
    enabled: bool
    def __init__(self, breakpoint: _Optional[int] = ..., enabled: _Optional[bool] = ...) -> None: ...

class ContinueHold(_message.Message):
    __slots__ = ("hold", "until", "until_site")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    UNTIL_SITE_FIELD_NUMBER: _ClassVar[int]
    hold: int
    until: SlotState
    until_site: Site
    def __init__(self, hold: _Optional[int] = ..., until: _Optional[_Union[SlotState, str]] = ..., until_site: _Optional[_Union[Site, str]] = ...) -> None: ...

class StepSlot(_message.Message):
    __slots__ = ("hold",)
    HOLD_FIELD_NUMBER: _ClassVar[int]
    hold: int
    def __init__(self, hold: _Optional[int] = ...) -> None: ...

class SkipCandidate(_message.Message):
    __slots__ = ("hold",)
    HOLD_FIELD_NUMBER: _ClassVar[int]
    hold: int
    def __init__(self, hold: _Optional[int] = ...) -> None: ...

class Disarm(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepPipeline(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunFor(_message.Message):
    __slots__ = ("duration_ns", "max_hold_ns")
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
    duration_ns: int
    max_hold_ns: int
    def __init__(self, duration_ns: _Optional[int] = ..., max_hold_ns: _Optional[int] = ...) -> None: ...

class Freeze(_message.Message):
    __slots__ = ("max_hold_ns",)
    MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
    max_hold_ns: int
    def __init__(self, max_hold_ns: _Optional[int] = ...) -> None: ...

class Thaw(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reset(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: ResetMode
    def __init__(self, mode: _Optional[_Union[ResetMode, str]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("deadline_ns",)
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    deadline_ns: int
    def __init__(self, deadline_ns: _Optional[int] = ...) -> None: ...

class BreakpointSpec(_message.Message):
    __slots__ = ("id", "site", "request", "from_state", "to_state", "tier", "route", "action", "enabled", "one_shot", "ignore_count", "max_hold_ns", "name", "status", "condition", "hit_condition", "log", "suspend", "depends_on", "on_timeout", "expires_ns", "persist")
    ID_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FROM_STATE_FIELD_NUMBER: _ClassVar[int]
    TO_STATE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    ONE_SHOT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    HIT_CONDITION_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_FIELD_NUMBER: _ClassVar[int]
    DEPENDS_ON_FIELD_NUMBER: _ClassVar[int]
    ON_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_NS_FIELD_NUMBER: _ClassVar[int]
    PERSIST_FIELD_NUMBER: _ClassVar[int]
    id: int
    site: Site
    request: str
    from_state: SlotState
    to_state: SlotState
    tier: Tier
    route: Route
    action: BreakpointAction
    enabled: bool
    one_shot: bool
    ignore_count: int
    max_hold_ns: int
    name: str
    status: CandidateStatus
    condition: str
    hit_condition: str
    log: str
    suspend: Suspend
    depends_on: int
    on_timeout: OnTimeout
    expires_ns: int
    persist: bool
    def __init__(self, id: _Optional[int] = ..., site: _Optional[_Union[Site, str]] = ..., request: _Optional[str] = ..., from_state: _Optional[_Union[SlotState, str]] = ..., to_state: _Optional[_Union[SlotState, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., route: _Optional[_Union[Route, str]] = ..., action: _Optional[_Union[BreakpointAction, str]] = ..., enabled: _Optional[bool] = ..., one_shot: _Optional[bool] = ..., ignore_count: _Optional[int] = ..., max_hold_ns: _Optional[int] = ..., name: _Optional[str] = ..., status: _Optional[_Union[CandidateStatus, str]] = ..., condition: _Optional[str] = ..., hit_condition: _Optional[str] = ..., log: _Optional[str] = ..., suspend: _Optional[_Union[Suspend, str]] = ..., depends_on: _Optional[int] = ..., on_timeout: _Optional[_Union[OnTimeout, str]] = ..., expires_ns: _Optional[int] = ..., persist: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("seq", "at_ns", "cause", "pool_known", "slot_opened", "slot_moved", "slot_closed", "slot_cloned", "lookup_answered", "blocks_staged", "staging_released", "device_blocks_assigned", "device_blocks_released", "blocks_filled", "blocks_evicted", "blocks_reserved", "blocks_ready", "blocks_dropped", "candidate_planned", "candidate_enqueued", "candidate_evaluated", "candidate_skipped", "candidate_promoted", "operation_started", "operation_reported", "candidate_ended", "batch_ended", "iteration_advanced", "prefix_scored", "hits_lost", "breakpoints_changed", "breakpoint_hit", "slot_held", "hold_parked", "hold_released", "hold_denied", "lease_changed", "reset_begun", "reset_done", "drain_begun", "stimulus_rejected", "completion_refused", "invariant_violated", "blocks_seen", "source_lost", "noted", "blocks_quarantined", "breakpoint_stopped", "slot_captured", "frozen", "thawed", "prefetch_limited", "content_mismatched", "engine_measured", "device_blocks_replaced", "connector_measured", "call_blocked", "audit_differed")
    class PoolKnown(_message.Message):
        __slots__ = ("pool", "source", "dp_rank", "group", "tier", "medium", "capacity_blocks", "block_tokens", "authority", "silent", "first_place", "window")
        POOL_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        DP_RANK_FIELD_NUMBER: _ClassVar[int]
        GROUP_FIELD_NUMBER: _ClassVar[int]
        TIER_FIELD_NUMBER: _ClassVar[int]
        MEDIUM_FIELD_NUMBER: _ClassVar[int]
        CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
        AUTHORITY_FIELD_NUMBER: _ClassVar[int]
        SILENT_FIELD_NUMBER: _ClassVar[int]
        FIRST_PLACE_FIELD_NUMBER: _ClassVar[int]
        WINDOW_FIELD_NUMBER: _ClassVar[int]
        pool: int
        source: int
        dp_rank: int
        group: int
        tier: Tier
        medium: str
        capacity_blocks: int
        block_tokens: int
        authority: Authority
        silent: bool
        first_place: int
        window: int
        def __init__(self, pool: _Optional[int] = ..., source: _Optional[int] = ..., dp_rank: _Optional[int] = ..., group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., medium: _Optional[str] = ..., capacity_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., authority: _Optional[_Union[Authority, str]] = ..., silent: _Optional[bool] = ..., first_place: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...
    class SlotOpened(_message.Message):
        __slots__ = ("slot", "request", "source", "hashes", "prompt_tokens", "output_limit", "priority", "session", "sends", "receives")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_LIMIT_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        SESSION_FIELD_NUMBER: _ClassVar[int]
        SENDS_FIELD_NUMBER: _ClassVar[int]
        RECEIVES_FIELD_NUMBER: _ClassVar[int]
        slot: int
        request: str
        source: int
        hashes: bytes
        prompt_tokens: int
        output_limit: int
        priority: int
        session: str
        sends: str
        receives: str
        def __init__(self, slot: _Optional[int] = ..., request: _Optional[str] = ..., source: _Optional[int] = ..., hashes: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., output_limit: _Optional[int] = ..., priority: _Optional[int] = ..., session: _Optional[str] = ..., sends: _Optional[str] = ..., receives: _Optional[str] = ...) -> None: ...
    class SlotMoved(_message.Message):
        __slots__ = ("slot", "old", "new", "entry", "iteration", "computed_tokens", "evaluated_blocks", "cached", "outstanding", "detail", "first_iteration", "skipped_iterations", "reason")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        OLD_FIELD_NUMBER: _ClassVar[int]
        NEW_FIELD_NUMBER: _ClassVar[int]
        ENTRY_FIELD_NUMBER: _ClassVar[int]
        ITERATION_FIELD_NUMBER: _ClassVar[int]
        COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        EVALUATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        CACHED_FIELD_NUMBER: _ClassVar[int]
        OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        FIRST_ITERATION_FIELD_NUMBER: _ClassVar[int]
        SKIPPED_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        slot: int
        old: SlotState
        new: SlotState
        entry: int
        iteration: int
        computed_tokens: int
        evaluated_blocks: int
        cached: _containers.RepeatedScalarFieldContainer[int]
        outstanding: int
        detail: int
        first_iteration: int
        skipped_iterations: int
        reason: FinishReason
        def __init__(self, slot: _Optional[int] = ..., old: _Optional[_Union[SlotState, str]] = ..., new: _Optional[_Union[SlotState, str]] = ..., entry: _Optional[int] = ..., iteration: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., evaluated_blocks: _Optional[int] = ..., cached: _Optional[_Iterable[int]] = ..., outstanding: _Optional[int] = ..., detail: _Optional[int] = ..., first_iteration: _Optional[int] = ..., skipped_iterations: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...
    class SlotClosed(_message.Message):
        __slots__ = ("slot",)
        SLOT_FIELD_NUMBER: _ClassVar[int]
        slot: int
        def __init__(self, slot: _Optional[int] = ...) -> None: ...
    class SlotCloned(_message.Message):
        __slots__ = ("slot", "parent", "request", "ids")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        PARENT_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        slot: int
        parent: int
        request: str
        ids: bytes
        def __init__(self, slot: _Optional[int] = ..., parent: _Optional[int] = ..., request: _Optional[str] = ..., ids: _Optional[bytes] = ...) -> None: ...
    class LookupAnswered(_message.Message):
        __slots__ = ("slot", "local_blocks", "matched", "first_miss", "why", "answer", "asynchronous")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        MATCHED_FIELD_NUMBER: _ClassVar[int]
        FIRST_MISS_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        ANSWER_FIELD_NUMBER: _ClassVar[int]
        ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
        slot: int
        local_blocks: int
        matched: _containers.RepeatedScalarFieldContainer[int]
        first_miss: int
        why: MissReason
        answer: int
        asynchronous: bool
        def __init__(self, slot: _Optional[int] = ..., local_blocks: _Optional[int] = ..., matched: _Optional[_Iterable[int]] = ..., first_miss: _Optional[int] = ..., why: _Optional[_Union[MissReason, str]] = ..., answer: _Optional[int] = ..., asynchronous: _Optional[bool] = ...) -> None: ...
    class BlocksStaged(_message.Message):
        __slots__ = ("slot", "pool", "ids", "prefetched")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        POOL_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        PREFETCHED_FIELD_NUMBER: _ClassVar[int]
        slot: int
        pool: int
        ids: bytes
        prefetched: int
        def __init__(self, slot: _Optional[int] = ..., pool: _Optional[int] = ..., ids: _Optional[bytes] = ..., prefetched: _Optional[int] = ...) -> None: ...
    class StagingReleased(_message.Message):
        __slots__ = ("slot", "why")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        slot: int
        why: ReleaseReason
        def __init__(self, slot: _Optional[int] = ..., why: _Optional[_Union[ReleaseReason, str]] = ...) -> None: ...
    class DeviceBlocksAssigned(_message.Message):
        __slots__ = ("pool", "slots", "counts", "ids", "reused", "external_tokens", "passed_blocks", "passed_hashes")
        POOL_FIELD_NUMBER: _ClassVar[int]
        SLOTS_FIELD_NUMBER: _ClassVar[int]
        COUNTS_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        REUSED_FIELD_NUMBER: _ClassVar[int]
        EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
        PASSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        PASSED_HASHES_FIELD_NUMBER: _ClassVar[int]
        pool: int
        slots: _containers.RepeatedScalarFieldContainer[int]
        counts: _containers.RepeatedScalarFieldContainer[int]
        ids: bytes
        reused: int
        external_tokens: int
        passed_blocks: int
        passed_hashes: bytes
        def __init__(self, pool: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., ids: _Optional[bytes] = ..., reused: _Optional[int] = ..., external_tokens: _Optional[int] = ..., passed_blocks: _Optional[int] = ..., passed_hashes: _Optional[bytes] = ...) -> None: ...
    class DeviceBlocksReleased(_message.Message):
        __slots__ = ("slot", "ids", "why")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        slot: int
        ids: bytes
        why: ReleaseReason
        def __init__(self, slot: _Optional[int] = ..., ids: _Optional[bytes] = ..., why: _Optional[_Union[ReleaseReason, str]] = ...) -> None: ...
    class BlocksFilled(_message.Message):
        __slots__ = ("pool", "slots", "counts", "ids", "hashes")
        POOL_FIELD_NUMBER: _ClassVar[int]
        SLOTS_FIELD_NUMBER: _ClassVar[int]
        COUNTS_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        pool: int
        slots: _containers.RepeatedScalarFieldContainer[int]
        counts: _containers.RepeatedScalarFieldContainer[int]
        ids: bytes
        hashes: bytes
        def __init__(self, pool: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...
    class BlocksEvicted(_message.Message):
        __slots__ = ("pool", "ids", "hashes", "for_slot", "rule")
        POOL_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        FOR_SLOT_FIELD_NUMBER: _ClassVar[int]
        RULE_FIELD_NUMBER: _ClassVar[int]
        pool: int
        ids: bytes
        hashes: bytes
        for_slot: int
        rule: EvictRule
        def __init__(self, pool: _Optional[int] = ..., ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., for_slot: _Optional[int] = ..., rule: _Optional[_Union[EvictRule, str]] = ...) -> None: ...
    class BlocksReserved(_message.Message):
        __slots__ = ("pool", "operation", "ids", "hashes")
        POOL_FIELD_NUMBER: _ClassVar[int]
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        pool: int
        operation: int
        ids: bytes
        hashes: bytes
        def __init__(self, pool: _Optional[int] = ..., operation: _Optional[int] = ..., ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...
    class BlocksReady(_message.Message):
        __slots__ = ("pool", "operation", "ids")
        POOL_FIELD_NUMBER: _ClassVar[int]
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        pool: int
        operation: int
        ids: bytes
        def __init__(self, pool: _Optional[int] = ..., operation: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...
    class BlocksDropped(_message.Message):
        __slots__ = ("pool", "operation", "ids", "why")
        POOL_FIELD_NUMBER: _ClassVar[int]
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        pool: int
        operation: int
        ids: bytes
        why: ReleaseReason
        def __init__(self, pool: _Optional[int] = ..., operation: _Optional[int] = ..., ids: _Optional[bytes] = ..., why: _Optional[_Union[ReleaseReason, str]] = ...) -> None: ...
    class CandidatePlanned(_message.Message):
        __slots__ = ("candidate", "slot", "route", "hashes", "targets", "first_block", "for_slot", "request")
        CANDIDATE_FIELD_NUMBER: _ClassVar[int]
        SLOT_FIELD_NUMBER: _ClassVar[int]
        ROUTE_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        TARGETS_FIELD_NUMBER: _ClassVar[int]
        FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
        FOR_SLOT_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        candidate: int
        slot: int
        route: Route
        hashes: bytes
        targets: bytes
        first_block: int
        for_slot: int
        request: str
        def __init__(self, candidate: _Optional[int] = ..., slot: _Optional[int] = ..., route: _Optional[_Union[Route, str]] = ..., hashes: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., first_block: _Optional[int] = ..., for_slot: _Optional[int] = ..., request: _Optional[str] = ...) -> None: ...
    class CandidateEnqueued(_message.Message):
        __slots__ = ("candidate",)
        CANDIDATE_FIELD_NUMBER: _ClassVar[int]
        candidate: int
        def __init__(self, candidate: _Optional[int] = ...) -> None: ...
    class CandidateEvaluated(_message.Message):
        __slots__ = ("candidate", "found", "filtered")
        CANDIDATE_FIELD_NUMBER: _ClassVar[int]
        FOUND_FIELD_NUMBER: _ClassVar[int]
        FILTERED_FIELD_NUMBER: _ClassVar[int]
        candidate: int
        found: int
        filtered: SkipReason
        def __init__(self, candidate: _Optional[int] = ..., found: _Optional[int] = ..., filtered: _Optional[_Union[SkipReason, str]] = ...) -> None: ...
    class CandidateSkipped(_message.Message):
        __slots__ = ("candidate", "reason")
        CANDIDATE_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        candidate: int
        reason: SkipReason
        def __init__(self, candidate: _Optional[int] = ..., reason: _Optional[_Union[SkipReason, str]] = ...) -> None: ...
    class CandidatePromoted(_message.Message):
        __slots__ = ("candidate", "operation", "batch", "source_pool", "target_pool", "sources", "targets", "thrash", "returned")
        CANDIDATE_FIELD_NUMBER: _ClassVar[int]
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        BATCH_FIELD_NUMBER: _ClassVar[int]
        SOURCE_POOL_FIELD_NUMBER: _ClassVar[int]
        TARGET_POOL_FIELD_NUMBER: _ClassVar[int]
        SOURCES_FIELD_NUMBER: _ClassVar[int]
        TARGETS_FIELD_NUMBER: _ClassVar[int]
        THRASH_FIELD_NUMBER: _ClassVar[int]
        RETURNED_FIELD_NUMBER: _ClassVar[int]
        candidate: int
        operation: int
        batch: int
        source_pool: int
        target_pool: int
        sources: bytes
        targets: bytes
        thrash: int
        returned: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, candidate: _Optional[int] = ..., operation: _Optional[int] = ..., batch: _Optional[int] = ..., source_pool: _Optional[int] = ..., target_pool: _Optional[int] = ..., sources: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., thrash: _Optional[int] = ..., returned: _Optional[_Iterable[int]] = ...) -> None: ...
    class OperationStarted(_message.Message):
        __slots__ = ("operation", "blocks", "size_bytes")
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        operation: int
        blocks: int
        size_bytes: int
        def __init__(self, operation: _Optional[int] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
    class OperationReported(_message.Message):
        __slots__ = ("operation", "rank", "ok", "error", "failed", "wire_ns")
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        OK_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        FAILED_FIELD_NUMBER: _ClassVar[int]
        WIRE_NS_FIELD_NUMBER: _ClassVar[int]
        operation: int
        rank: int
        ok: bool
        error: str
        failed: bytes
        wire_ns: int
        def __init__(self, operation: _Optional[int] = ..., rank: _Optional[int] = ..., ok: _Optional[bool] = ..., error: _Optional[str] = ..., failed: _Optional[bytes] = ..., wire_ns: _Optional[int] = ...) -> None: ...
    class CandidateEnded(_message.Message):
        __slots__ = ("candidate", "status")
        CANDIDATE_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        candidate: int
        status: CandidateStatus
        def __init__(self, candidate: _Optional[int] = ..., status: _Optional[_Union[CandidateStatus, str]] = ...) -> None: ...
    class BatchEnded(_message.Message):
        __slots__ = ("batch",)
        BATCH_FIELD_NUMBER: _ClassVar[int]
        batch: int
        def __init__(self, batch: _Optional[int] = ...) -> None: ...
    class IterationAdvanced(_message.Message):
        __slots__ = ("iteration", "count", "running", "waiting", "slots", "positions", "ended")
        ITERATION_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        SLOTS_FIELD_NUMBER: _ClassVar[int]
        POSITIONS_FIELD_NUMBER: _ClassVar[int]
        ENDED_FIELD_NUMBER: _ClassVar[int]
        iteration: int
        count: int
        running: int
        waiting: int
        slots: _containers.RepeatedScalarFieldContainer[int]
        positions: _containers.RepeatedScalarFieldContainer[int]
        ended: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, iteration: _Optional[int] = ..., count: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...
    class PrefixScored(_message.Message):
        __slots__ = ("slot", "prompt_blocks", "hits", "again_tiers", "again_within_ns", "again_blocks", "readmitted")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        HITS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_TIERS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_WITHIN_NS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        READMITTED_FIELD_NUMBER: _ClassVar[int]
        slot: int
        prompt_blocks: int
        hits: _containers.RepeatedScalarFieldContainer[int]
        again_tiers: _containers.RepeatedScalarFieldContainer[int]
        again_within_ns: _containers.RepeatedScalarFieldContainer[int]
        again_blocks: _containers.RepeatedScalarFieldContainer[int]
        readmitted: bool
        def __init__(self, slot: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., hits: _Optional[_Iterable[int]] = ..., again_tiers: _Optional[_Iterable[int]] = ..., again_within_ns: _Optional[_Iterable[int]] = ..., again_blocks: _Optional[_Iterable[int]] = ..., readmitted: _Optional[bool] = ...) -> None: ...
    class HitsLost(_message.Message):
        __slots__ = ("slot", "tier", "blocks", "position", "readmitted")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        TIER_FIELD_NUMBER: _ClassVar[int]
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        READMITTED_FIELD_NUMBER: _ClassVar[int]
        slot: int
        tier: Tier
        blocks: int
        position: int
        readmitted: bool
        def __init__(self, slot: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ..., position: _Optional[int] = ..., readmitted: _Optional[bool] = ...) -> None: ...
    class BreakpointsChanged(_message.Message):
        __slots__ = ("owner", "specs", "by")
        OWNER_FIELD_NUMBER: _ClassVar[int]
        SPECS_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        owner: str
        specs: _containers.RepeatedCompositeFieldContainer[BreakpointSpec]
        by: str
        def __init__(self, owner: _Optional[str] = ..., specs: _Optional[_Iterable[_Union[BreakpointSpec, _Mapping]]] = ..., by: _Optional[str] = ...) -> None: ...
    class BreakpointHit(_message.Message):
        __slots__ = ("breakpoints", "slot", "site", "action", "message")
        BREAKPOINTS_FIELD_NUMBER: _ClassVar[int]
        SLOT_FIELD_NUMBER: _ClassVar[int]
        SITE_FIELD_NUMBER: _ClassVar[int]
        ACTION_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        breakpoints: _containers.RepeatedScalarFieldContainer[int]
        slot: int
        site: Site
        action: BreakpointAction
        message: str
        def __init__(self, breakpoints: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., site: _Optional[_Union[Site, str]] = ..., action: _Optional[_Union[BreakpointAction, str]] = ..., message: _Optional[str] = ...) -> None: ...
    class SlotHeld(_message.Message):
        __slots__ = ("hold", "slot", "site", "point", "breakpoints", "owner", "max_hold_ns", "suspend", "on_timeout")
        HOLD_FIELD_NUMBER: _ClassVar[int]
        SLOT_FIELD_NUMBER: _ClassVar[int]
        SITE_FIELD_NUMBER: _ClassVar[int]
        POINT_FIELD_NUMBER: _ClassVar[int]
        BREAKPOINTS_FIELD_NUMBER: _ClassVar[int]
        OWNER_FIELD_NUMBER: _ClassVar[int]
        MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
        SUSPEND_FIELD_NUMBER: _ClassVar[int]
        ON_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
        hold: int
        slot: int
        site: Site
        point: WaitPoint
        breakpoints: _containers.RepeatedScalarFieldContainer[int]
        owner: str
        max_hold_ns: int
        suspend: Suspend
        on_timeout: OnTimeout
        def __init__(self, hold: _Optional[int] = ..., slot: _Optional[int] = ..., site: _Optional[_Union[Site, str]] = ..., point: _Optional[_Union[WaitPoint, str]] = ..., breakpoints: _Optional[_Iterable[int]] = ..., owner: _Optional[str] = ..., max_hold_ns: _Optional[int] = ..., suspend: _Optional[_Union[Suspend, str]] = ..., on_timeout: _Optional[_Union[OnTimeout, str]] = ...) -> None: ...
    class HoldParked(_message.Message):
        __slots__ = ("hold",)
        HOLD_FIELD_NUMBER: _ClassVar[int]
        hold: int
        def __init__(self, hold: _Optional[int] = ...) -> None: ...
    class HoldReleased(_message.Message):
        __slots__ = ("hold", "slot", "why", "by", "held_ns")
        HOLD_FIELD_NUMBER: _ClassVar[int]
        SLOT_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        HELD_NS_FIELD_NUMBER: _ClassVar[int]
        hold: int
        slot: int
        why: HoldEnd
        by: str
        held_ns: int
        def __init__(self, hold: _Optional[int] = ..., slot: _Optional[int] = ..., why: _Optional[_Union[HoldEnd, str]] = ..., by: _Optional[str] = ..., held_ns: _Optional[int] = ...) -> None: ...
    class HoldDenied(_message.Message):
        __slots__ = ("slot", "site", "why")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        SITE_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        slot: int
        site: Site
        why: str
        def __init__(self, slot: _Optional[int] = ..., site: _Optional[_Union[Site, str]] = ..., why: _Optional[str] = ...) -> None: ...
    class LeaseChanged(_message.Message):
        __slots__ = ("owner", "live", "back")
        OWNER_FIELD_NUMBER: _ClassVar[int]
        LIVE_FIELD_NUMBER: _ClassVar[int]
        BACK_FIELD_NUMBER: _ClassVar[int]
        owner: str
        live: bool
        back: bool
        def __init__(self, owner: _Optional[str] = ..., live: _Optional[bool] = ..., back: _Optional[bool] = ...) -> None: ...
    class ResetBegun(_message.Message):
        __slots__ = ("mode", "by")
        MODE_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        mode: ResetMode
        by: str
        def __init__(self, mode: _Optional[_Union[ResetMode, str]] = ..., by: _Optional[str] = ...) -> None: ...
    class ResetDone(_message.Message):
        __slots__ = ("mode", "epoch")
        MODE_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        mode: ResetMode
        epoch: int
        def __init__(self, mode: _Optional[_Union[ResetMode, str]] = ..., epoch: _Optional[int] = ...) -> None: ...
    class DrainBegun(_message.Message):
        __slots__ = ("deadline_ns", "by")
        DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        deadline_ns: int
        by: str
        def __init__(self, deadline_ns: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...
    class StimulusRejected(_message.Message):
        __slots__ = ("entry", "request", "why")
        ENTRY_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        entry: int
        request: str
        why: str
        def __init__(self, entry: _Optional[int] = ..., request: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...
    class CompletionRefused(_message.Message):
        __slots__ = ("operation", "epoch", "rank", "why")
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        operation: int
        epoch: int
        rank: int
        why: str
        def __init__(self, operation: _Optional[int] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...
    class InvariantViolated(_message.Message):
        __slots__ = ("rule", "detail", "story")
        RULE_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        STORY_FIELD_NUMBER: _ClassVar[int]
        rule: str
        detail: str
        story: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, rule: _Optional[str] = ..., detail: _Optional[str] = ..., story: _Optional[_Iterable[str]] = ...) -> None: ...
    class BlocksSeen(_message.Message):
        __slots__ = ("pool", "stored", "removed", "cleared", "chains", "parents", "marked", "contents", "contexts", "again_within_ns", "again_within_blocks", "again_blocks", "age_ns")
        POOL_FIELD_NUMBER: _ClassVar[int]
        STORED_FIELD_NUMBER: _ClassVar[int]
        REMOVED_FIELD_NUMBER: _ClassVar[int]
        CLEARED_FIELD_NUMBER: _ClassVar[int]
        CHAINS_FIELD_NUMBER: _ClassVar[int]
        PARENTS_FIELD_NUMBER: _ClassVar[int]
        MARKED_FIELD_NUMBER: _ClassVar[int]
        CONTENTS_FIELD_NUMBER: _ClassVar[int]
        CONTEXTS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_WITHIN_NS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_WITHIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        AGE_NS_FIELD_NUMBER: _ClassVar[int]
        pool: int
        stored: bytes
        removed: bytes
        cleared: bool
        chains: bytes
        parents: bytes
        marked: bytes
        contents: bytes
        contexts: _containers.RepeatedScalarFieldContainer[str]
        again_within_ns: _containers.RepeatedScalarFieldContainer[int]
        again_within_blocks: _containers.RepeatedScalarFieldContainer[int]
        again_blocks: _containers.RepeatedScalarFieldContainer[int]
        age_ns: int
        def __init__(self, pool: _Optional[int] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: _Optional[bool] = ..., chains: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., marked: _Optional[bytes] = ..., contents: _Optional[bytes] = ..., contexts: _Optional[_Iterable[str]] = ..., again_within_ns: _Optional[_Iterable[int]] = ..., again_within_blocks: _Optional[_Iterable[int]] = ..., again_blocks: _Optional[_Iterable[int]] = ..., age_ns: _Optional[int] = ...) -> None: ...
    class SourceLost(_message.Message):
        __slots__ = ("source", "first", "last", "restarted", "gone", "replaceable")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        RESTARTED_FIELD_NUMBER: _ClassVar[int]
        GONE_FIELD_NUMBER: _ClassVar[int]
        REPLACEABLE_FIELD_NUMBER: _ClassVar[int]
        source: int
        first: int
        last: int
        restarted: bool
        gone: bool
        replaceable: bool
        def __init__(self, source: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., restarted: _Optional[bool] = ..., gone: _Optional[bool] = ..., replaceable: _Optional[bool] = ...) -> None: ...
    class Noted(_message.Message):
        __slots__ = ("note", "detail")
        NOTE_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        note: Note
        detail: str
        def __init__(self, note: _Optional[_Union[Note, str]] = ..., detail: _Optional[str] = ...) -> None: ...
    class BlocksQuarantined(_message.Message):
        __slots__ = ("pool", "operation", "ids", "reported")
        POOL_FIELD_NUMBER: _ClassVar[int]
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        REPORTED_FIELD_NUMBER: _ClassVar[int]
        pool: int
        operation: int
        ids: bytes
        reported: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, pool: _Optional[int] = ..., operation: _Optional[int] = ..., ids: _Optional[bytes] = ..., reported: _Optional[_Iterable[int]] = ...) -> None: ...
    class BreakpointStopped(_message.Message):
        __slots__ = ("breakpoint", "why", "message")
        BREAKPOINT_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        breakpoint: int
        why: BreakpointEnd
        message: str
        def __init__(self, breakpoint: _Optional[int] = ..., why: _Optional[_Union[BreakpointEnd, str]] = ..., message: _Optional[str] = ...) -> None: ...
    class SlotCaptured(_message.Message):
        __slots__ = ("slot", "site", "breakpoints", "names", "values")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        SITE_FIELD_NUMBER: _ClassVar[int]
        BREAKPOINTS_FIELD_NUMBER: _ClassVar[int]
        NAMES_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        slot: int
        site: Site
        breakpoints: _containers.RepeatedScalarFieldContainer[int]
        names: _containers.RepeatedScalarFieldContainer[str]
        values: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, slot: _Optional[int] = ..., site: _Optional[_Union[Site, str]] = ..., breakpoints: _Optional[_Iterable[int]] = ..., names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ...) -> None: ...
    class Frozen(_message.Message):
        __slots__ = ("by", "max_hold_ns")
        BY_FIELD_NUMBER: _ClassVar[int]
        MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
        by: str
        max_hold_ns: int
        def __init__(self, by: _Optional[str] = ..., max_hold_ns: _Optional[int] = ...) -> None: ...
    class Thawed(_message.Message):
        __slots__ = ("why", "by", "held_ns")
        WHY_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        HELD_NS_FIELD_NUMBER: _ClassVar[int]
        why: HoldEnd
        by: str
        held_ns: int
        def __init__(self, why: _Optional[_Union[HoldEnd, str]] = ..., by: _Optional[str] = ..., held_ns: _Optional[int] = ...) -> None: ...
    class PrefetchLimited(_message.Message):
        __slots__ = ("limited", "used", "judged")
        LIMITED_FIELD_NUMBER: _ClassVar[int]
        USED_FIELD_NUMBER: _ClassVar[int]
        JUDGED_FIELD_NUMBER: _ClassVar[int]
        limited: bool
        used: int
        judged: int
        def __init__(self, limited: _Optional[bool] = ..., used: _Optional[int] = ..., judged: _Optional[int] = ...) -> None: ...
    class ContentMismatched(_message.Message):
        __slots__ = ("slot", "source", "request", "rank", "group", "hashes", "kind", "stage", "place", "below", "copy", "writer", "edge", "taken")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        GROUP_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        STAGE_FIELD_NUMBER: _ClassVar[int]
        PLACE_FIELD_NUMBER: _ClassVar[int]
        BELOW_FIELD_NUMBER: _ClassVar[int]
        COPY_FIELD_NUMBER: _ClassVar[int]
        WRITER_FIELD_NUMBER: _ClassVar[int]
        EDGE_FIELD_NUMBER: _ClassVar[int]
        TAKEN_FIELD_NUMBER: _ClassVar[int]
        slot: int
        source: int
        request: str
        rank: int
        group: int
        hashes: bytes
        kind: str
        stage: str
        place: int
        below: int
        copy: int
        writer: str
        edge: str
        taken: str
        def __init__(self, slot: _Optional[int] = ..., source: _Optional[int] = ..., request: _Optional[str] = ..., rank: _Optional[int] = ..., group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., kind: _Optional[str] = ..., stage: _Optional[str] = ..., place: _Optional[int] = ..., below: _Optional[int] = ..., copy: _Optional[int] = ..., writer: _Optional[str] = ..., edge: _Optional[str] = ..., taken: _Optional[str] = ...) -> None: ...
    class EngineMeasured(_message.Message):
        __slots__ = ("source", "measures", "values")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        MEASURES_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        source: int
        measures: _containers.RepeatedScalarFieldContainer[Measure]
        values: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, source: _Optional[int] = ..., measures: _Optional[_Iterable[_Union[Measure, str]]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...
    class DeviceBlocksReplaced(_message.Message):
        __slots__ = ("slot", "first", "ids")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        slot: int
        first: int
        ids: bytes
        def __init__(self, slot: _Optional[int] = ..., first: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...
    class ConnectorMeasured(_message.Message):
        __slots__ = ("source", "connectors", "methods", "calls", "total_ns", "longest_ns", "stats", "values")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        CONNECTORS_FIELD_NUMBER: _ClassVar[int]
        METHODS_FIELD_NUMBER: _ClassVar[int]
        CALLS_FIELD_NUMBER: _ClassVar[int]
        TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
        LONGEST_NS_FIELD_NUMBER: _ClassVar[int]
        STATS_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        source: int
        connectors: _containers.RepeatedScalarFieldContainer[str]
        methods: _containers.RepeatedScalarFieldContainer[str]
        calls: _containers.RepeatedScalarFieldContainer[int]
        total_ns: _containers.RepeatedScalarFieldContainer[int]
        longest_ns: _containers.RepeatedScalarFieldContainer[int]
        stats: _containers.RepeatedScalarFieldContainer[str]
        values: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, source: _Optional[int] = ..., connectors: _Optional[_Iterable[str]] = ..., methods: _Optional[_Iterable[str]] = ..., calls: _Optional[_Iterable[int]] = ..., total_ns: _Optional[_Iterable[int]] = ..., longest_ns: _Optional[_Iterable[int]] = ..., stats: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...
    class CallBlocked(_message.Message):
        __slots__ = ("slot", "source", "request", "connector", "method", "took_ns")
        SLOT_FIELD_NUMBER: _ClassVar[int]
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        CONNECTOR_FIELD_NUMBER: _ClassVar[int]
        METHOD_FIELD_NUMBER: _ClassVar[int]
        TOOK_NS_FIELD_NUMBER: _ClassVar[int]
        slot: int
        source: int
        request: str
        connector: str
        method: str
        took_ns: int
        def __init__(self, slot: _Optional[int] = ..., source: _Optional[int] = ..., request: _Optional[str] = ..., connector: _Optional[str] = ..., method: _Optional[str] = ..., took_ns: _Optional[int] = ...) -> None: ...
    class AuditDiffered(_message.Message):
        __slots__ = ("pool", "ids", "hashes", "detail")
        POOL_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        pool: int
        ids: bytes
        hashes: bytes
        detail: str
        def __init__(self, pool: _Optional[int] = ..., ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., detail: _Optional[str] = ...) -> None: ...
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    POOL_KNOWN_FIELD_NUMBER: _ClassVar[int]
    SLOT_OPENED_FIELD_NUMBER: _ClassVar[int]
    SLOT_MOVED_FIELD_NUMBER: _ClassVar[int]
    SLOT_CLOSED_FIELD_NUMBER: _ClassVar[int]
    SLOT_CLONED_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STAGED_FIELD_NUMBER: _ClassVar[int]
    STAGING_RELEASED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FILLED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_PLANNED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ENQUEUED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_EVALUATED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_PROMOTED_FIELD_NUMBER: _ClassVar[int]
    OPERATION_STARTED_FIELD_NUMBER: _ClassVar[int]
    OPERATION_REPORTED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ENDED_FIELD_NUMBER: _ClassVar[int]
    BATCH_ENDED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_ADVANCED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SCORED_FIELD_NUMBER: _ClassVar[int]
    HITS_LOST_FIELD_NUMBER: _ClassVar[int]
    BREAKPOINTS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    BREAKPOINT_HIT_FIELD_NUMBER: _ClassVar[int]
    SLOT_HELD_FIELD_NUMBER: _ClassVar[int]
    HOLD_PARKED_FIELD_NUMBER: _ClassVar[int]
    HOLD_RELEASED_FIELD_NUMBER: _ClassVar[int]
    HOLD_DENIED_FIELD_NUMBER: _ClassVar[int]
    LEASE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    RESET_BEGUN_FIELD_NUMBER: _ClassVar[int]
    RESET_DONE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_BEGUN_FIELD_NUMBER: _ClassVar[int]
    STIMULUS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_REFUSED_FIELD_NUMBER: _ClassVar[int]
    INVARIANT_VIOLATED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SEEN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LOST_FIELD_NUMBER: _ClassVar[int]
    NOTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    BREAKPOINT_STOPPED_FIELD_NUMBER: _ClassVar[int]
    SLOT_CAPTURED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    THAWED_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_LIMITED_FIELD_NUMBER: _ClassVar[int]
    CONTENT_MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_MEASURED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_MEASURED_FIELD_NUMBER: _ClassVar[int]
    CALL_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    AUDIT_DIFFERED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    at_ns: int
    cause: int
    pool_known: Event.PoolKnown
    slot_opened: Event.SlotOpened
    slot_moved: Event.SlotMoved
    slot_closed: Event.SlotClosed
    slot_cloned: Event.SlotCloned
    lookup_answered: Event.LookupAnswered
    blocks_staged: Event.BlocksStaged
    staging_released: Event.StagingReleased
    device_blocks_assigned: Event.DeviceBlocksAssigned
    device_blocks_released: Event.DeviceBlocksReleased
    blocks_filled: Event.BlocksFilled
    blocks_evicted: Event.BlocksEvicted
    blocks_reserved: Event.BlocksReserved
    blocks_ready: Event.BlocksReady
    blocks_dropped: Event.BlocksDropped
    candidate_planned: Event.CandidatePlanned
    candidate_enqueued: Event.CandidateEnqueued
    candidate_evaluated: Event.CandidateEvaluated
    candidate_skipped: Event.CandidateSkipped
    candidate_promoted: Event.CandidatePromoted
    operation_started: Event.OperationStarted
    operation_reported: Event.OperationReported
    candidate_ended: Event.CandidateEnded
    batch_ended: Event.BatchEnded
    iteration_advanced: Event.IterationAdvanced
    prefix_scored: Event.PrefixScored
    hits_lost: Event.HitsLost
    breakpoints_changed: Event.BreakpointsChanged
    breakpoint_hit: Event.BreakpointHit
    slot_held: Event.SlotHeld
    hold_parked: Event.HoldParked
    hold_released: Event.HoldReleased
    hold_denied: Event.HoldDenied
    lease_changed: Event.LeaseChanged
    reset_begun: Event.ResetBegun
    reset_done: Event.ResetDone
    drain_begun: Event.DrainBegun
    stimulus_rejected: Event.StimulusRejected
    completion_refused: Event.CompletionRefused
    invariant_violated: Event.InvariantViolated
    blocks_seen: Event.BlocksSeen
    source_lost: Event.SourceLost
    noted: Event.Noted
    blocks_quarantined: Event.BlocksQuarantined
    breakpoint_stopped: Event.BreakpointStopped
    slot_captured: Event.SlotCaptured
    frozen: Event.Frozen
    thawed: Event.Thawed
    prefetch_limited: Event.PrefetchLimited
    content_mismatched: Event.ContentMismatched
    engine_measured: Event.EngineMeasured
    device_blocks_replaced: Event.DeviceBlocksReplaced
    connector_measured: Event.ConnectorMeasured
    call_blocked: Event.CallBlocked
    audit_differed: Event.AuditDiffered
    def __init__(self, seq: _Optional[int] = ..., at_ns: _Optional[int] = ..., cause: _Optional[int] = ..., pool_known: _Optional[_Union[Event.PoolKnown, _Mapping]] = ..., slot_opened: _Optional[_Union[Event.SlotOpened, _Mapping]] = ..., slot_moved: _Optional[_Union[Event.SlotMoved, _Mapping]] = ..., slot_closed: _Optional[_Union[Event.SlotClosed, _Mapping]] = ..., slot_cloned: _Optional[_Union[Event.SlotCloned, _Mapping]] = ..., lookup_answered: _Optional[_Union[Event.LookupAnswered, _Mapping]] = ..., blocks_staged: _Optional[_Union[Event.BlocksStaged, _Mapping]] = ..., staging_released: _Optional[_Union[Event.StagingReleased, _Mapping]] = ..., device_blocks_assigned: _Optional[_Union[Event.DeviceBlocksAssigned, _Mapping]] = ..., device_blocks_released: _Optional[_Union[Event.DeviceBlocksReleased, _Mapping]] = ..., blocks_filled: _Optional[_Union[Event.BlocksFilled, _Mapping]] = ..., blocks_evicted: _Optional[_Union[Event.BlocksEvicted, _Mapping]] = ..., blocks_reserved: _Optional[_Union[Event.BlocksReserved, _Mapping]] = ..., blocks_ready: _Optional[_Union[Event.BlocksReady, _Mapping]] = ..., blocks_dropped: _Optional[_Union[Event.BlocksDropped, _Mapping]] = ..., candidate_planned: _Optional[_Union[Event.CandidatePlanned, _Mapping]] = ..., candidate_enqueued: _Optional[_Union[Event.CandidateEnqueued, _Mapping]] = ..., candidate_evaluated: _Optional[_Union[Event.CandidateEvaluated, _Mapping]] = ..., candidate_skipped: _Optional[_Union[Event.CandidateSkipped, _Mapping]] = ..., candidate_promoted: _Optional[_Union[Event.CandidatePromoted, _Mapping]] = ..., operation_started: _Optional[_Union[Event.OperationStarted, _Mapping]] = ..., operation_reported: _Optional[_Union[Event.OperationReported, _Mapping]] = ..., candidate_ended: _Optional[_Union[Event.CandidateEnded, _Mapping]] = ..., batch_ended: _Optional[_Union[Event.BatchEnded, _Mapping]] = ..., iteration_advanced: _Optional[_Union[Event.IterationAdvanced, _Mapping]] = ..., prefix_scored: _Optional[_Union[Event.PrefixScored, _Mapping]] = ..., hits_lost: _Optional[_Union[Event.HitsLost, _Mapping]] = ..., breakpoints_changed: _Optional[_Union[Event.BreakpointsChanged, _Mapping]] = ..., breakpoint_hit: _Optional[_Union[Event.BreakpointHit, _Mapping]] = ..., slot_held: _Optional[_Union[Event.SlotHeld, _Mapping]] = ..., hold_parked: _Optional[_Union[Event.HoldParked, _Mapping]] = ..., hold_released: _Optional[_Union[Event.HoldReleased, _Mapping]] = ..., hold_denied: _Optional[_Union[Event.HoldDenied, _Mapping]] = ..., lease_changed: _Optional[_Union[Event.LeaseChanged, _Mapping]] = ..., reset_begun: _Optional[_Union[Event.ResetBegun, _Mapping]] = ..., reset_done: _Optional[_Union[Event.ResetDone, _Mapping]] = ..., drain_begun: _Optional[_Union[Event.DrainBegun, _Mapping]] = ..., stimulus_rejected: _Optional[_Union[Event.StimulusRejected, _Mapping]] = ..., completion_refused: _Optional[_Union[Event.CompletionRefused, _Mapping]] = ..., invariant_violated: _Optional[_Union[Event.InvariantViolated, _Mapping]] = ..., blocks_seen: _Optional[_Union[Event.BlocksSeen, _Mapping]] = ..., source_lost: _Optional[_Union[Event.SourceLost, _Mapping]] = ..., noted: _Optional[_Union[Event.Noted, _Mapping]] = ..., blocks_quarantined: _Optional[_Union[Event.BlocksQuarantined, _Mapping]] = ..., breakpoint_stopped: _Optional[_Union[Event.BreakpointStopped, _Mapping]] = ..., slot_captured: _Optional[_Union[Event.SlotCaptured, _Mapping]] = ..., frozen: _Optional[_Union[Event.Frozen, _Mapping]] = ..., thawed: _Optional[_Union[Event.Thawed, _Mapping]] = ..., prefetch_limited: _Optional[_Union[Event.PrefetchLimited, _Mapping]] = ..., content_mismatched: _Optional[_Union[Event.ContentMismatched, _Mapping]] = ..., engine_measured: _Optional[_Union[Event.EngineMeasured, _Mapping]] = ..., device_blocks_replaced: _Optional[_Union[Event.DeviceBlocksReplaced, _Mapping]] = ..., connector_measured: _Optional[_Union[Event.ConnectorMeasured, _Mapping]] = ..., call_blocked: _Optional[_Union[Event.CallBlocked, _Mapping]] = ..., audit_differed: _Optional[_Union[Event.AuditDiffered, _Mapping]] = ...) -> None: ...

class Stimulus(_message.Message):
    __slots__ = ("n", "at_ns", "source", "origin_ns", "pool_declared", "request_arrived", "match_requested", "blocks_allocated", "iteration_scheduled", "iteration_finished", "request_preempted", "request_cloned", "request_finished", "transfer_started", "transfer_finished", "transfer_failed", "blocks_reported", "source_gapped", "source_restarted", "breakpoints_replaced", "hold_continued", "slot_stepped", "pipeline_stepped", "run_for_requested", "candidate_skip_requested", "frozen", "thawed", "disarmed", "lease_granted", "lease_lost", "deadline_passed", "breakpoint_overran", "reset_requested", "drain_requested", "noted", "call_announced", "lookup_observed", "copies_observed", "mismatch_reported", "measures_reported", "copy_begun", "copy_ended", "connector_reported", "call_reported", "places_audited", "blocks_restored")
    class PoolDeclared(_message.Message):
        __slots__ = ("dp_rank", "group", "tier", "medium", "capacity_blocks", "block_tokens", "authority", "silent", "first_place", "window")
        DP_RANK_FIELD_NUMBER: _ClassVar[int]
        GROUP_FIELD_NUMBER: _ClassVar[int]
        TIER_FIELD_NUMBER: _ClassVar[int]
        MEDIUM_FIELD_NUMBER: _ClassVar[int]
        CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
        AUTHORITY_FIELD_NUMBER: _ClassVar[int]
        SILENT_FIELD_NUMBER: _ClassVar[int]
        FIRST_PLACE_FIELD_NUMBER: _ClassVar[int]
        WINDOW_FIELD_NUMBER: _ClassVar[int]
        dp_rank: int
        group: int
        tier: Tier
        medium: str
        capacity_blocks: int
        block_tokens: int
        authority: Authority
        silent: bool
        first_place: int
        window: int
        def __init__(self, dp_rank: _Optional[int] = ..., group: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., medium: _Optional[str] = ..., capacity_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., authority: _Optional[_Union[Authority, str]] = ..., silent: _Optional[bool] = ..., first_place: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...
    class RequestArrived(_message.Message):
        __slots__ = ("request", "hashes", "prompt_tokens", "output_limit", "priority", "session", "sends", "receives")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_LIMIT_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        SESSION_FIELD_NUMBER: _ClassVar[int]
        SENDS_FIELD_NUMBER: _ClassVar[int]
        RECEIVES_FIELD_NUMBER: _ClassVar[int]
        request: str
        hashes: bytes
        prompt_tokens: int
        output_limit: int
        priority: int
        session: str
        sends: str
        receives: str
        def __init__(self, request: _Optional[str] = ..., hashes: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., output_limit: _Optional[int] = ..., priority: _Optional[int] = ..., session: _Optional[str] = ..., sends: _Optional[str] = ..., receives: _Optional[str] = ...) -> None: ...
    class MatchRequested(_message.Message):
        __slots__ = ("request", "computed_tokens")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        request: str
        computed_tokens: int
        def __init__(self, request: _Optional[str] = ..., computed_tokens: _Optional[int] = ...) -> None: ...
    class BlocksAllocated(_message.Message):
        __slots__ = ("request", "block_ids", "external_tokens", "awaits_start", "found", "hashes", "passed_blocks", "passed_hashes")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
        EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
        AWAITS_START_FIELD_NUMBER: _ClassVar[int]
        FOUND_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        PASSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        PASSED_HASHES_FIELD_NUMBER: _ClassVar[int]
        request: str
        block_ids: bytes
        external_tokens: int
        awaits_start: bool
        found: _containers.RepeatedScalarFieldContainer[int]
        hashes: bytes
        passed_blocks: int
        passed_hashes: bytes
        def __init__(self, request: _Optional[str] = ..., block_ids: _Optional[bytes] = ..., external_tokens: _Optional[int] = ..., awaits_start: _Optional[bool] = ..., found: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., passed_blocks: _Optional[int] = ..., passed_hashes: _Optional[bytes] = ...) -> None: ...
    class IterationScheduled(_message.Message):
        __slots__ = ("iteration", "count", "new", "resumed", "preempted", "skipped", "unskipped", "first_tokens", "progressed", "positions", "appended", "appended_counts", "appended_ids", "running", "waiting", "ended")
        ITERATION_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        NEW_FIELD_NUMBER: _ClassVar[int]
        RESUMED_FIELD_NUMBER: _ClassVar[int]
        PREEMPTED_FIELD_NUMBER: _ClassVar[int]
        SKIPPED_FIELD_NUMBER: _ClassVar[int]
        UNSKIPPED_FIELD_NUMBER: _ClassVar[int]
        FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
        PROGRESSED_FIELD_NUMBER: _ClassVar[int]
        POSITIONS_FIELD_NUMBER: _ClassVar[int]
        APPENDED_FIELD_NUMBER: _ClassVar[int]
        APPENDED_COUNTS_FIELD_NUMBER: _ClassVar[int]
        APPENDED_IDS_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        ENDED_FIELD_NUMBER: _ClassVar[int]
        iteration: int
        count: int
        new: _containers.RepeatedScalarFieldContainer[str]
        resumed: _containers.RepeatedScalarFieldContainer[str]
        preempted: _containers.RepeatedScalarFieldContainer[str]
        skipped: _containers.RepeatedScalarFieldContainer[str]
        unskipped: _containers.RepeatedScalarFieldContainer[str]
        first_tokens: _containers.RepeatedScalarFieldContainer[str]
        progressed: _containers.RepeatedScalarFieldContainer[str]
        positions: _containers.RepeatedScalarFieldContainer[int]
        appended: _containers.RepeatedScalarFieldContainer[str]
        appended_counts: _containers.RepeatedScalarFieldContainer[int]
        appended_ids: bytes
        running: int
        waiting: int
        ended: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, iteration: _Optional[int] = ..., count: _Optional[int] = ..., new: _Optional[_Iterable[str]] = ..., resumed: _Optional[_Iterable[str]] = ..., preempted: _Optional[_Iterable[str]] = ..., skipped: _Optional[_Iterable[str]] = ..., unskipped: _Optional[_Iterable[str]] = ..., first_tokens: _Optional[_Iterable[str]] = ..., progressed: _Optional[_Iterable[str]] = ..., positions: _Optional[_Iterable[int]] = ..., appended: _Optional[_Iterable[str]] = ..., appended_counts: _Optional[_Iterable[int]] = ..., appended_ids: _Optional[bytes] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...
    class IterationFinished(_message.Message):
        __slots__ = ("iteration", "requests", "counts", "block_ids", "hashes", "unkept")
        ITERATION_FIELD_NUMBER: _ClassVar[int]
        REQUESTS_FIELD_NUMBER: _ClassVar[int]
        COUNTS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        UNKEPT_FIELD_NUMBER: _ClassVar[int]
        iteration: int
        requests: _containers.RepeatedScalarFieldContainer[str]
        counts: _containers.RepeatedScalarFieldContainer[int]
        block_ids: bytes
        hashes: bytes
        unkept: bytes
        def __init__(self, iteration: _Optional[int] = ..., requests: _Optional[_Iterable[str]] = ..., counts: _Optional[_Iterable[int]] = ..., block_ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., unkept: _Optional[bytes] = ...) -> None: ...
    class RequestPreempted(_message.Message):
        __slots__ = ("request",)
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        request: str
        def __init__(self, request: _Optional[str] = ...) -> None: ...
    class RequestCloned(_message.Message):
        __slots__ = ("request", "clones", "partial_ids")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        CLONES_FIELD_NUMBER: _ClassVar[int]
        PARTIAL_IDS_FIELD_NUMBER: _ClassVar[int]
        request: str
        clones: _containers.RepeatedScalarFieldContainer[str]
        partial_ids: bytes
        def __init__(self, request: _Optional[str] = ..., clones: _Optional[_Iterable[str]] = ..., partial_ids: _Optional[bytes] = ...) -> None: ...
    class RequestFinished(_message.Message):
        __slots__ = ("request", "block_ids", "reason", "delayed")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        DELAYED_FIELD_NUMBER: _ClassVar[int]
        request: str
        block_ids: bytes
        reason: FinishReason
        delayed: bool
        def __init__(self, request: _Optional[str] = ..., block_ids: _Optional[bytes] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., delayed: _Optional[bool] = ...) -> None: ...
    class TransferStarted(_message.Message):
        __slots__ = ("operation", "epoch")
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        operation: int
        epoch: int
        def __init__(self, operation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
    class TransferFinished(_message.Message):
        __slots__ = ("operation", "epoch", "rank")
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        operation: int
        epoch: int
        rank: int
        def __init__(self, operation: _Optional[int] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...
    class TransferFailed(_message.Message):
        __slots__ = ("operation", "epoch", "rank", "error", "failed")
        OPERATION_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        FAILED_FIELD_NUMBER: _ClassVar[int]
        operation: int
        epoch: int
        rank: int
        error: str
        failed: bytes
        def __init__(self, operation: _Optional[int] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., error: _Optional[str] = ..., failed: _Optional[bytes] = ...) -> None: ...
    class BlocksReported(_message.Message):
        __slots__ = ("pool", "stored", "removed", "cleared", "places", "request", "chains", "parents", "marked", "contents", "contexts", "again_within_ns", "again_within_blocks", "again_blocks", "age_ns")
        POOL_FIELD_NUMBER: _ClassVar[int]
        STORED_FIELD_NUMBER: _ClassVar[int]
        REMOVED_FIELD_NUMBER: _ClassVar[int]
        CLEARED_FIELD_NUMBER: _ClassVar[int]
        PLACES_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        CHAINS_FIELD_NUMBER: _ClassVar[int]
        PARENTS_FIELD_NUMBER: _ClassVar[int]
        MARKED_FIELD_NUMBER: _ClassVar[int]
        CONTENTS_FIELD_NUMBER: _ClassVar[int]
        CONTEXTS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_WITHIN_NS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_WITHIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        AGAIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        AGE_NS_FIELD_NUMBER: _ClassVar[int]
        pool: int
        stored: bytes
        removed: bytes
        cleared: bool
        places: bytes
        request: str
        chains: bytes
        parents: bytes
        marked: bytes
        contents: bytes
        contexts: _containers.RepeatedScalarFieldContainer[str]
        again_within_ns: _containers.RepeatedScalarFieldContainer[int]
        again_within_blocks: _containers.RepeatedScalarFieldContainer[int]
        again_blocks: _containers.RepeatedScalarFieldContainer[int]
        age_ns: int
        def __init__(self, pool: _Optional[int] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: _Optional[bool] = ..., places: _Optional[bytes] = ..., request: _Optional[str] = ..., chains: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., marked: _Optional[bytes] = ..., contents: _Optional[bytes] = ..., contexts: _Optional[_Iterable[str]] = ..., again_within_ns: _Optional[_Iterable[int]] = ..., again_within_blocks: _Optional[_Iterable[int]] = ..., again_blocks: _Optional[_Iterable[int]] = ..., age_ns: _Optional[int] = ...) -> None: ...
    class SourceGapped(_message.Message):
        __slots__ = ("first", "last")
        FIRST_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        first: int
        last: int
        def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...
    class SourceRestarted(_message.Message):
        __slots__ = ("gone", "replaceable")
        GONE_FIELD_NUMBER: _ClassVar[int]
        REPLACEABLE_FIELD_NUMBER: _ClassVar[int]
        gone: bool
        replaceable: bool
        def __init__(self, gone: _Optional[bool] = ..., replaceable: _Optional[bool] = ...) -> None: ...
    class BreakpointsReplaced(_message.Message):
        __slots__ = ("owner", "specs", "by")
        OWNER_FIELD_NUMBER: _ClassVar[int]
        SPECS_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        owner: str
        specs: _containers.RepeatedCompositeFieldContainer[BreakpointSpec]
        by: str
        def __init__(self, owner: _Optional[str] = ..., specs: _Optional[_Iterable[_Union[BreakpointSpec, _Mapping]]] = ..., by: _Optional[str] = ...) -> None: ...
    class HoldContinued(_message.Message):
        __slots__ = ("hold", "by", "until", "until_site")
        HOLD_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        UNTIL_FIELD_NUMBER: _ClassVar[int]
        UNTIL_SITE_FIELD_NUMBER: _ClassVar[int]
        hold: int
        by: str
        until: SlotState
        until_site: Site
        def __init__(self, hold: _Optional[int] = ..., by: _Optional[str] = ..., until: _Optional[_Union[SlotState, str]] = ..., until_site: _Optional[_Union[Site, str]] = ...) -> None: ...
    class SlotStepped(_message.Message):
        __slots__ = ("hold", "by")
        HOLD_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        hold: int
        by: str
        def __init__(self, hold: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...
    class PipelineStepped(_message.Message):
        __slots__ = ("by",)
        BY_FIELD_NUMBER: _ClassVar[int]
        by: str
        def __init__(self, by: _Optional[str] = ...) -> None: ...
    class RunForRequested(_message.Message):
        __slots__ = ("duration_ns", "by", "max_hold_ns")
        DURATION_NS_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
        duration_ns: int
        by: str
        max_hold_ns: int
        def __init__(self, duration_ns: _Optional[int] = ..., by: _Optional[str] = ..., max_hold_ns: _Optional[int] = ...) -> None: ...
    class CandidateSkipRequested(_message.Message):
        __slots__ = ("hold", "by")
        HOLD_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        hold: int
        by: str
        def __init__(self, hold: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...
    class Frozen(_message.Message):
        __slots__ = ("by", "max_hold_ns")
        BY_FIELD_NUMBER: _ClassVar[int]
        MAX_HOLD_NS_FIELD_NUMBER: _ClassVar[int]
        by: str
        max_hold_ns: int
        def __init__(self, by: _Optional[str] = ..., max_hold_ns: _Optional[int] = ...) -> None: ...
    class Thawed(_message.Message):
        __slots__ = ("by",)
        BY_FIELD_NUMBER: _ClassVar[int]
        by: str
        def __init__(self, by: _Optional[str] = ...) -> None: ...
    class Disarmed(_message.Message):
        __slots__ = ("by",)
        BY_FIELD_NUMBER: _ClassVar[int]
        by: str
        def __init__(self, by: _Optional[str] = ...) -> None: ...
    class LeaseGranted(_message.Message):
        __slots__ = ("owner", "back")
        OWNER_FIELD_NUMBER: _ClassVar[int]
        BACK_FIELD_NUMBER: _ClassVar[int]
        owner: str
        back: bool
        def __init__(self, owner: _Optional[str] = ..., back: _Optional[bool] = ...) -> None: ...
    class LeaseLost(_message.Message):
        __slots__ = ("owner",)
        OWNER_FIELD_NUMBER: _ClassVar[int]
        owner: str
        def __init__(self, owner: _Optional[str] = ...) -> None: ...
    class DeadlinePassed(_message.Message):
        __slots__ = ("deadline",)
        DEADLINE_FIELD_NUMBER: _ClassVar[int]
        deadline: int
        def __init__(self, deadline: _Optional[int] = ...) -> None: ...
    class BreakpointOverran(_message.Message):
        __slots__ = ("breakpoint", "message")
        BREAKPOINT_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        breakpoint: int
        message: str
        def __init__(self, breakpoint: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
    class ResetRequested(_message.Message):
        __slots__ = ("mode", "by")
        MODE_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        mode: ResetMode
        by: str
        def __init__(self, mode: _Optional[_Union[ResetMode, str]] = ..., by: _Optional[str] = ...) -> None: ...
    class DrainRequested(_message.Message):
        __slots__ = ("deadline_ns", "by")
        DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        deadline_ns: int
        by: str
        def __init__(self, deadline_ns: _Optional[int] = ..., by: _Optional[str] = ...) -> None: ...
    class Noted(_message.Message):
        __slots__ = ("note", "detail")
        NOTE_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        note: Note
        detail: str
        def __init__(self, note: _Optional[_Union[Note, str]] = ..., detail: _Optional[str] = ...) -> None: ...
    class CallAnnounced(_message.Message):
        __slots__ = ("request", "entry")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        ENTRY_FIELD_NUMBER: _ClassVar[int]
        request: str
        entry: int
        def __init__(self, request: _Optional[str] = ..., entry: _Optional[int] = ...) -> None: ...
    class LookupObserved(_message.Message):
        __slots__ = ("request", "computed_tokens", "tokens", "asynchronous", "tier")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
        TIER_FIELD_NUMBER: _ClassVar[int]
        request: str
        computed_tokens: int
        tokens: int
        asynchronous: bool
        tier: Tier
        def __init__(self, request: _Optional[str] = ..., computed_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., asynchronous: _Optional[bool] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...
    class CopiesObserved(_message.Message):
        __slots__ = ("loaded", "sent", "failed", "failed_ids")
        LOADED_FIELD_NUMBER: _ClassVar[int]
        SENT_FIELD_NUMBER: _ClassVar[int]
        FAILED_FIELD_NUMBER: _ClassVar[int]
        FAILED_IDS_FIELD_NUMBER: _ClassVar[int]
        loaded: _containers.RepeatedScalarFieldContainer[str]
        sent: _containers.RepeatedScalarFieldContainer[str]
        failed: _containers.RepeatedScalarFieldContainer[str]
        failed_ids: bytes
        def __init__(self, loaded: _Optional[_Iterable[str]] = ..., sent: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[str]] = ..., failed_ids: _Optional[bytes] = ...) -> None: ...
    class MismatchReported(_message.Message):
        __slots__ = ("request", "rank", "group", "hashes", "kind", "stage", "place", "below", "copy", "writer", "edge", "taken")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        GROUP_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        STAGE_FIELD_NUMBER: _ClassVar[int]
        PLACE_FIELD_NUMBER: _ClassVar[int]
        BELOW_FIELD_NUMBER: _ClassVar[int]
        COPY_FIELD_NUMBER: _ClassVar[int]
        WRITER_FIELD_NUMBER: _ClassVar[int]
        EDGE_FIELD_NUMBER: _ClassVar[int]
        TAKEN_FIELD_NUMBER: _ClassVar[int]
        request: str
        rank: int
        group: int
        hashes: bytes
        kind: str
        stage: str
        place: int
        below: int
        copy: int
        writer: str
        edge: str
        taken: str
        def __init__(self, request: _Optional[str] = ..., rank: _Optional[int] = ..., group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., kind: _Optional[str] = ..., stage: _Optional[str] = ..., place: _Optional[int] = ..., below: _Optional[int] = ..., copy: _Optional[int] = ..., writer: _Optional[str] = ..., edge: _Optional[str] = ..., taken: _Optional[str] = ...) -> None: ...
    class MeasuresReported(_message.Message):
        __slots__ = ("measures", "values")
        MEASURES_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        measures: _containers.RepeatedScalarFieldContainer[Measure]
        values: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, measures: _Optional[_Iterable[_Union[Measure, str]]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...
    class CopyBegun(_message.Message):
        __slots__ = ("copy", "request", "source_pool", "target_pool", "hashes", "blocks", "size_bytes", "asks")
        COPY_FIELD_NUMBER: _ClassVar[int]
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        SOURCE_POOL_FIELD_NUMBER: _ClassVar[int]
        TARGET_POOL_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        ASKS_FIELD_NUMBER: _ClassVar[int]
        copy: int
        request: str
        source_pool: int
        target_pool: int
        hashes: bytes
        blocks: int
        size_bytes: int
        asks: bool
        def __init__(self, copy: _Optional[int] = ..., request: _Optional[str] = ..., source_pool: _Optional[int] = ..., target_pool: _Optional[int] = ..., hashes: _Optional[bytes] = ..., blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ..., asks: _Optional[bool] = ...) -> None: ...
    class CopyEnded(_message.Message):
        __slots__ = ("copy", "status", "wire_ns", "error")
        COPY_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        WIRE_NS_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        copy: int
        status: CandidateStatus
        wire_ns: int
        error: str
        def __init__(self, copy: _Optional[int] = ..., status: _Optional[_Union[CandidateStatus, str]] = ..., wire_ns: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...
    class ConnectorReported(_message.Message):
        __slots__ = ("connectors", "methods", "calls", "total_ns", "longest_ns", "stats", "values")
        CONNECTORS_FIELD_NUMBER: _ClassVar[int]
        METHODS_FIELD_NUMBER: _ClassVar[int]
        CALLS_FIELD_NUMBER: _ClassVar[int]
        TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
        LONGEST_NS_FIELD_NUMBER: _ClassVar[int]
        STATS_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        connectors: _containers.RepeatedScalarFieldContainer[str]
        methods: _containers.RepeatedScalarFieldContainer[str]
        calls: _containers.RepeatedScalarFieldContainer[int]
        total_ns: _containers.RepeatedScalarFieldContainer[int]
        longest_ns: _containers.RepeatedScalarFieldContainer[int]
        stats: _containers.RepeatedScalarFieldContainer[str]
        values: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, connectors: _Optional[_Iterable[str]] = ..., methods: _Optional[_Iterable[str]] = ..., calls: _Optional[_Iterable[int]] = ..., total_ns: _Optional[_Iterable[int]] = ..., longest_ns: _Optional[_Iterable[int]] = ..., stats: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...
    class CallReported(_message.Message):
        __slots__ = ("request", "connector", "method", "took_ns")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        CONNECTOR_FIELD_NUMBER: _ClassVar[int]
        METHOD_FIELD_NUMBER: _ClassVar[int]
        TOOK_NS_FIELD_NUMBER: _ClassVar[int]
        request: str
        connector: str
        method: str
        took_ns: int
        def __init__(self, request: _Optional[str] = ..., connector: _Optional[str] = ..., method: _Optional[str] = ..., took_ns: _Optional[int] = ...) -> None: ...
    class PlacesAudited(_message.Message):
        __slots__ = ("pool", "first", "hashes", "references", "free", "cached")
        POOL_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        REFERENCES_FIELD_NUMBER: _ClassVar[int]
        FREE_FIELD_NUMBER: _ClassVar[int]
        CACHED_FIELD_NUMBER: _ClassVar[int]
        pool: int
        first: int
        hashes: bytes
        references: bytes
        free: int
        cached: int
        def __init__(self, pool: _Optional[int] = ..., first: _Optional[int] = ..., hashes: _Optional[bytes] = ..., references: _Optional[bytes] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ...) -> None: ...
    class BlocksRestored(_message.Message):
        __slots__ = ("pool", "ids", "hashes")
        POOL_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        pool: int
        ids: bytes
        hashes: bytes
        def __init__(self, pool: _Optional[int] = ..., ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_NS_FIELD_NUMBER: _ClassVar[int]
    POOL_DECLARED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    MATCH_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLONED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FINISHED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_STARTED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FINISHED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REPORTED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_GAPPED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RESTARTED_FIELD_NUMBER: _ClassVar[int]
    BREAKPOINTS_REPLACED_FIELD_NUMBER: _ClassVar[int]
    HOLD_CONTINUED_FIELD_NUMBER: _ClassVar[int]
    SLOT_STEPPED_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STEPPED_FIELD_NUMBER: _ClassVar[int]
    RUN_FOR_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_SKIP_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    THAWED_FIELD_NUMBER: _ClassVar[int]
    DISARMED_FIELD_NUMBER: _ClassVar[int]
    LEASE_GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LOST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_PASSED_FIELD_NUMBER: _ClassVar[int]
    BREAKPOINT_OVERRAN_FIELD_NUMBER: _ClassVar[int]
    RESET_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    NOTED_FIELD_NUMBER: _ClassVar[int]
    CALL_ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_OBSERVED_FIELD_NUMBER: _ClassVar[int]
    COPIES_OBSERVED_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_REPORTED_FIELD_NUMBER: _ClassVar[int]
    MEASURES_REPORTED_FIELD_NUMBER: _ClassVar[int]
    COPY_BEGUN_FIELD_NUMBER: _ClassVar[int]
    COPY_ENDED_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_REPORTED_FIELD_NUMBER: _ClassVar[int]
    CALL_REPORTED_FIELD_NUMBER: _ClassVar[int]
    PLACES_AUDITED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESTORED_FIELD_NUMBER: _ClassVar[int]
    n: int
    at_ns: int
    source: int
    origin_ns: int
    pool_declared: Stimulus.PoolDeclared
    request_arrived: Stimulus.RequestArrived
    match_requested: Stimulus.MatchRequested
    blocks_allocated: Stimulus.BlocksAllocated
    iteration_scheduled: Stimulus.IterationScheduled
    iteration_finished: Stimulus.IterationFinished
    request_preempted: Stimulus.RequestPreempted
    request_cloned: Stimulus.RequestCloned
    request_finished: Stimulus.RequestFinished
    transfer_started: Stimulus.TransferStarted
    transfer_finished: Stimulus.TransferFinished
    transfer_failed: Stimulus.TransferFailed
    blocks_reported: Stimulus.BlocksReported
    source_gapped: Stimulus.SourceGapped
    source_restarted: Stimulus.SourceRestarted
    breakpoints_replaced: Stimulus.BreakpointsReplaced
    hold_continued: Stimulus.HoldContinued
    slot_stepped: Stimulus.SlotStepped
    pipeline_stepped: Stimulus.PipelineStepped
    run_for_requested: Stimulus.RunForRequested
    candidate_skip_requested: Stimulus.CandidateSkipRequested
    frozen: Stimulus.Frozen
    thawed: Stimulus.Thawed
    disarmed: Stimulus.Disarmed
    lease_granted: Stimulus.LeaseGranted
    lease_lost: Stimulus.LeaseLost
    deadline_passed: Stimulus.DeadlinePassed
    breakpoint_overran: Stimulus.BreakpointOverran
    reset_requested: Stimulus.ResetRequested
    drain_requested: Stimulus.DrainRequested
    noted: Stimulus.Noted
    call_announced: Stimulus.CallAnnounced
    lookup_observed: Stimulus.LookupObserved
    copies_observed: Stimulus.CopiesObserved
    mismatch_reported: Stimulus.MismatchReported
    measures_reported: Stimulus.MeasuresReported
    copy_begun: Stimulus.CopyBegun
    copy_ended: Stimulus.CopyEnded
    connector_reported: Stimulus.ConnectorReported
    call_reported: Stimulus.CallReported
    places_audited: Stimulus.PlacesAudited
    blocks_restored: Stimulus.BlocksRestored
    def __init__(self, n: _Optional[int] = ..., at_ns: _Optional[int] = ..., source: _Optional[int] = ..., origin_ns: _Optional[int] = ..., pool_declared: _Optional[_Union[Stimulus.PoolDeclared, _Mapping]] = ..., request_arrived: _Optional[_Union[Stimulus.RequestArrived, _Mapping]] = ..., match_requested: _Optional[_Union[Stimulus.MatchRequested, _Mapping]] = ..., blocks_allocated: _Optional[_Union[Stimulus.BlocksAllocated, _Mapping]] = ..., iteration_scheduled: _Optional[_Union[Stimulus.IterationScheduled, _Mapping]] = ..., iteration_finished: _Optional[_Union[Stimulus.IterationFinished, _Mapping]] = ..., request_preempted: _Optional[_Union[Stimulus.RequestPreempted, _Mapping]] = ..., request_cloned: _Optional[_Union[Stimulus.RequestCloned, _Mapping]] = ..., request_finished: _Optional[_Union[Stimulus.RequestFinished, _Mapping]] = ..., transfer_started: _Optional[_Union[Stimulus.TransferStarted, _Mapping]] = ..., transfer_finished: _Optional[_Union[Stimulus.TransferFinished, _Mapping]] = ..., transfer_failed: _Optional[_Union[Stimulus.TransferFailed, _Mapping]] = ..., blocks_reported: _Optional[_Union[Stimulus.BlocksReported, _Mapping]] = ..., source_gapped: _Optional[_Union[Stimulus.SourceGapped, _Mapping]] = ..., source_restarted: _Optional[_Union[Stimulus.SourceRestarted, _Mapping]] = ..., breakpoints_replaced: _Optional[_Union[Stimulus.BreakpointsReplaced, _Mapping]] = ..., hold_continued: _Optional[_Union[Stimulus.HoldContinued, _Mapping]] = ..., slot_stepped: _Optional[_Union[Stimulus.SlotStepped, _Mapping]] = ..., pipeline_stepped: _Optional[_Union[Stimulus.PipelineStepped, _Mapping]] = ..., run_for_requested: _Optional[_Union[Stimulus.RunForRequested, _Mapping]] = ..., candidate_skip_requested: _Optional[_Union[Stimulus.CandidateSkipRequested, _Mapping]] = ..., frozen: _Optional[_Union[Stimulus.Frozen, _Mapping]] = ..., thawed: _Optional[_Union[Stimulus.Thawed, _Mapping]] = ..., disarmed: _Optional[_Union[Stimulus.Disarmed, _Mapping]] = ..., lease_granted: _Optional[_Union[Stimulus.LeaseGranted, _Mapping]] = ..., lease_lost: _Optional[_Union[Stimulus.LeaseLost, _Mapping]] = ..., deadline_passed: _Optional[_Union[Stimulus.DeadlinePassed, _Mapping]] = ..., breakpoint_overran: _Optional[_Union[Stimulus.BreakpointOverran, _Mapping]] = ..., reset_requested: _Optional[_Union[Stimulus.ResetRequested, _Mapping]] = ..., drain_requested: _Optional[_Union[Stimulus.DrainRequested, _Mapping]] = ..., noted: _Optional[_Union[Stimulus.Noted, _Mapping]] = ..., call_announced: _Optional[_Union[Stimulus.CallAnnounced, _Mapping]] = ..., lookup_observed: _Optional[_Union[Stimulus.LookupObserved, _Mapping]] = ..., copies_observed: _Optional[_Union[Stimulus.CopiesObserved, _Mapping]] = ..., mismatch_reported: _Optional[_Union[Stimulus.MismatchReported, _Mapping]] = ..., measures_reported: _Optional[_Union[Stimulus.MeasuresReported, _Mapping]] = ..., copy_begun: _Optional[_Union[Stimulus.CopyBegun, _Mapping]] = ..., copy_ended: _Optional[_Union[Stimulus.CopyEnded, _Mapping]] = ..., connector_reported: _Optional[_Union[Stimulus.ConnectorReported, _Mapping]] = ..., call_reported: _Optional[_Union[Stimulus.CallReported, _Mapping]] = ..., places_audited: _Optional[_Union[Stimulus.PlacesAudited, _Mapping]] = ..., blocks_restored: _Optional[_Union[Stimulus.BlocksRestored, _Mapping]] = ...) -> None: ...
