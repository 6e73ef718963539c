//! The closing summary: the text of the last frame.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The closing summary of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Call sites.
    pub sites: Sites,
    /// Records and losses; filled in by the writer, which counts them.
    pub vcpus: Vec<VcpuTotals>,
    /// Calls that were counted, if any; filled in by the writer, which adds them up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counted: Option<Counted>,
    /// Pauses of all vCPUs.
    pub pauses: Pauses,
    /// Waiting for room in rings, if vCPUs did that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waits>,
    /// Exits of vCPUs, if they were traced: by vCPU, and of each the reasons that there were.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exits: Vec<ExitsOf>,
    /// Time spent patching, in nanoseconds.
    pub patch_ns: u64,
    /// The clock of the guest's log beside that of the stream, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_clock: Option<GuestClock>,
    /// How the run ended.
    pub exit: Exit,
    /// Exit status of `--run`.
    pub run_status: Option<i32>,
    /// Anything else that the user should know.
    pub notes: Vec<String>,
}

/// What became of the call sites.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sites {
    /// Matched by the filters.
    pub matched: u64,
    /// Patched at least once.
    pub patched: u64,
    /// The same by tracer, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tracers: Vec<u64>,
    /// Their names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Of those patched, so many work for one tracer alone.
    pub direct: u64,
    /// The others, for several at once.
    pub combined: u64,
    /// So many of those patched were used by the guest's own ftrace as well, at the most at once.
    #[serde(skip_serializing_if = "is_zero")]
    pub shared: u64,
    /// So often the guest's own ftrace has changed sites.
    #[serde(skip_serializing_if = "is_zero")]
    pub guest_updates: u64,
    /// Left alone, by reason.
    pub skipped: Vec<Skipped>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Sites left alone for one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Skipped {
    /// The reason.
    pub reason: String,
    /// How many.
    pub count: u64,
    /// Names of some of them.
    pub examples: Vec<String>,
}

/// Totals of one vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VcpuTotals {
    /// Records in the stream.
    pub records: u64,
    /// Records lost before the stream.
    pub lost: u64,
    /// The lost ones by the name of their reason.
    pub lost_by_reason: BTreeMap<String, u64>,
}

/// What was counted beside the records, by all tracers that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counted {
    /// Functions that were called.
    pub functions: u64,
    /// Calls, one for each tracer that has counted it.
    pub calls: u64,
}

/// Pauses of all vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pauses {
    /// How many.
    pub count: u64,
    /// Their sum in nanoseconds.
    pub total_ns: u64,
    /// The longest in nanoseconds.
    pub max_ns: u64,
}

/// The clock that the guest's kernel has for its log (`local_clock`, kernel/sched/clock.c), beside the
/// clock of time stamps: both are of one rate, and begin at different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestClock {
    /// Ticks of the stream's clock at which that of the log shows 0.
    pub zero_ticks: u64,
    /// The same in nanoseconds since the `clock_start` of the stream's header, rounded down.
    pub zero_ns: u64,
    /// So many nanoseconds the log's clock was ahead of this (behind, if it is negative) at its
    /// beginning. How it came from there to here is not known: the kernel has followed its tick.
    pub early_ns: i64,
    /// So many nanoseconds it had gained on the stream's clock when it was compared again at the end.
    pub drift_ns: i64,
}

/// How vCPUs waited for room in their rings instead of losing records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Waits {
    /// Each by itself: the time in all of each vCPU, in nanoseconds.
    pub vcpus_ns: Vec<u64>,
    /// All together, while the output took nothing: so often.
    pub stalls: u64,
    /// The time of these in nanoseconds.
    pub stalls_ns: u64,
}

/// Exits of one vCPU for one reason, as far as they are in the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExitsOf {
    /// The vCPU.
    pub cpu: u32,
    /// The reason, as events have it.
    pub reason: String,
    /// How many.
    pub count: u64,
    /// For how long the vCPU was out, all together, in nanoseconds.
    pub total_ns: u64,
    /// The longest, in nanoseconds.
    pub max_ns: u64,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exit {
    /// The guest powered off.
    Poweroff,
    /// The guest reset itself.
    Reset,
    /// The guest's kernel panicked.
    Panic,
    /// A fault inside the handling of a double fault.
    TripleFault,
    /// The guest halted: nothing runs in it any more, as it was asked for. Since 1.2.
    Halt,
    /// A CPU of the guest, or all, could not be interrupted any more. Since 1.2.
    Hang,
    /// `--timeout` passed.
    Timeout,
    /// The user stopped it.
    Stopped,
    /// Not known, or a reason of a later version.
    #[default]
    #[serde(other)]
    Unknown,
}

impl Exit {
    /// A few words for people; also what the summary line says.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Poweroff => "poweroff",
            Self::Reset => "reset",
            Self::Panic => "panic",
            Self::TripleFault => "triple fault",
            Self::Halt => "halt",
            Self::Hang => "hang",
            Self::Timeout => "timeout",
            Self::Stopped => "stopped",
            Self::Unknown => "unknown",
        }
    }
}

impl Summary {
    /// Records of all vCPUs.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.vcpus.iter().fold(0, |sum, vcpu| sum.saturating_add(vcpu.records))
    }

    /// Lost records of all vCPUs.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.vcpus.iter().fold(0, |sum, vcpu| sum.saturating_add(vcpu.lost))
    }
}
