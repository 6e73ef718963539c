//! The subset of Perfetto's messages that is written. Names and numbers of fields are those of
//! `protos/perfetto/trace` in Perfetto's repository.

use prost::Message;

/// `TracePacket.sequence_flags`: what was interned before is forgotten.
pub(super) const STATE_CLEARED: u32 = 1;
/// `TracePacket.sequence_flags`: what was interned is needed.
pub(super) const NEEDS_STATE: u32 = 2;

/// `FtraceStats.phase`.
pub(super) const START_OF_TRACE: i32 = 1;
pub(super) const END_OF_TRACE: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct TracePacket {
    #[prost(message, optional, tag = "1")]
    pub(super) ftrace_events: Option<FtraceEventBundle>,
    #[prost(uint64, optional, tag = "8")]
    pub(super) timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    pub(super) trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "12")]
    pub(super) interned_data: Option<InternedData>,
    #[prost(uint32, optional, tag = "13")]
    pub(super) sequence_flags: Option<u32>,
    #[prost(message, optional, tag = "34")]
    pub(super) ftrace_stats: Option<FtraceStats>,
    #[prost(message, optional, tag = "45")]
    pub(super) system_info: Option<SystemInfo>,
    #[prost(message, optional, tag = "60")]
    pub(super) track_descriptor: Option<TrackDescriptor>,
}

impl TracePacket {
    /// The sequence of all.
    pub(super) const SEQUENCE: u32 = 1;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct InternedData {
    #[prost(message, repeated, tag = "1")]
    pub(super) event_categories: Vec<Interned>,
    #[prost(message, repeated, tag = "2")]
    pub(super) event_names: Vec<Interned>,
    #[prost(message, repeated, tag = "3")]
    pub(super) debug_annotation_names: Vec<Interned>,
    #[prost(message, repeated, tag = "29")]
    pub(super) debug_annotation_string_values: Vec<Interned>,
}

/// All kinds of interned texts look the same.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Interned {
    #[prost(uint64, optional, tag = "1")]
    pub(super) iid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    pub(super) text: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    pub(super) uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    pub(super) name: Option<String>,
    #[prost(message, optional, tag = "3")]
    pub(super) process: Option<ProcessDescriptor>,
    #[prost(message, optional, tag = "4")]
    pub(super) thread: Option<ThreadDescriptor>,
    #[prost(uint64, optional, tag = "5")]
    pub(super) parent_uuid: Option<u64>,
    #[prost(message, optional, tag = "8")]
    pub(super) counter: Option<CounterDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessDescriptor {
    #[prost(int32, optional, tag = "1")]
    pub(super) pid: Option<i32>,
    #[prost(string, optional, tag = "6")]
    pub(super) process_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ThreadDescriptor {
    #[prost(int32, optional, tag = "1")]
    pub(super) pid: Option<i32>,
    #[prost(int32, optional, tag = "2")]
    pub(super) tid: Option<i32>,
    #[prost(string, optional, tag = "5")]
    pub(super) thread_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CounterDescriptor {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct FtraceEventBundle {
    #[prost(uint32, optional, tag = "1")]
    pub(super) cpu: Option<u32>,
    /// Messages, which look the same as bytes.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub(super) event: Vec<Vec<u8>>,
    #[prost(bool, optional, tag = "3")]
    pub(super) lost_events: Option<bool>,
}

/// `GenericFtraceEvent`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Generic {
    #[prost(string, optional, tag = "1")]
    pub(super) event_name: Option<String>,
    #[prost(message, repeated, tag = "2")]
    pub(super) field: Vec<GenericField>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GenericField {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(oneof = "GenericValue", tags = "3, 4, 5")]
    pub(super) value: Option<GenericValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum GenericValue {
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(int64, tag = "4")]
    Int(i64),
    #[prost(uint64, tag = "5")]
    Uint(u64),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct FtraceStats {
    #[prost(int32, optional, tag = "1")]
    pub(super) phase: Option<i32>,
    #[prost(message, repeated, tag = "2")]
    pub(super) cpu_stats: Vec<FtraceCpuStats>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct FtraceCpuStats {
    #[prost(uint64, optional, tag = "1")]
    pub(super) cpu: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    pub(super) entries: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    pub(super) overrun: Option<u64>,
    #[prost(uint64, optional, tag = "8")]
    pub(super) dropped_events: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SystemInfo {
    #[prost(message, optional, tag = "1")]
    pub(super) utsname: Option<Utsname>,
    #[prost(string, optional, tag = "4")]
    pub(super) tracing_service_version: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Utsname {
    #[prost(string, optional, tag = "1")]
    pub(super) sysname: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub(super) release: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub(super) machine: Option<String>,
}
