"""Every message on a wire: frozen, typed, tagged, versioned; MessagePack by msgspec.

Decoding rejects what it does not know: another version, an unknown tag, an unknown or ill-typed field, a value beyond
its bounds (`bounds`). Durations are seconds on the sender's own clock; no timestamp crosses a process border.

Who sends what::

    worker → coordinator     Register, LinkReady, LinkFailed, Heartbeat, Granted, StepTokens, PrefillReport,
                             HandoffReport, Dropped, Left
    coordinator → worker     Welcome, Denied, Peers, Prefill, Reserve, PushTo, Generate, Cancel, Stop, StartAnew,
                             TakeRole
    prefill → decode         PeerHello, ProbeRequest, ProbeSeal, Renew, Seal, RevokeAck
    decode → prefill         PeerWelcome, PeerDenied, PeerUnknown, ProbeGrant, ProbeAck, SealAck, Revoke
"""

from __future__ import annotations

from twinpool.messages.base import PROTOCOL_VERSION, Message
from twinpool.messages.codec import MAX_MESSAGE_BYTES, AnyMessage, decode, encode
from twinpool.messages.control import (
    Cancel,
    Denied,
    Dropped,
    DropReason,
    Generate,
    Granted,
    HandoffReport,
    Heartbeat,
    Left,
    LinkFailed,
    LinkReady,
    PeerInfo,
    Peers,
    Prefill,
    PrefillReport,
    PromptLogprobs,
    PushTo,
    Register,
    Reserve,
    StartAnew,
    StepTokens,
    Stop,
    TakeRole,
    Token,
    Welcome,
    WorkerStats,
)
from twinpool.messages.lockstep import LockstepTokens
from twinpool.messages.peer import (
    Manifest,
    PeerDenied,
    PeerHello,
    PeerUnknown,
    PeerWelcome,
    ProbeAck,
    ProbeGrant,
    ProbeRequest,
    ProbeSeal,
    Renew,
    Revoke,
    RevokeAck,
    Seal,
    SealAck,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "AnyMessage",
    "Cancel",
    "Denied",
    "DropReason",
    "Dropped",
    "Generate",
    "Granted",
    "HandoffReport",
    "Heartbeat",
    "Left",
    "LinkFailed",
    "LinkReady",
    "LockstepTokens",
    "Manifest",
    "Message",
    "PeerDenied",
    "PeerHello",
    "PeerInfo",
    "PeerUnknown",
    "PeerWelcome",
    "Peers",
    "Prefill",
    "PrefillReport",
    "ProbeAck",
    "ProbeGrant",
    "ProbeRequest",
    "ProbeSeal",
    "PromptLogprobs",
    "PushTo",
    "Register",
    "Renew",
    "Reserve",
    "Revoke",
    "RevokeAck",
    "Seal",
    "SealAck",
    "StartAnew",
    "StepTokens",
    "Stop",
    "TakeRole",
    "Token",
    "Welcome",
    "WorkerStats",
    "decode",
    "encode",
]
