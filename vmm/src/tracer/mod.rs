//! Plan, annex, patching, rings: knows guest memory and a pause, never KVM.
//!
//! Everything here works on a [`Guest`]: guest-physical memory that no vCPU uses meanwhile. Unit
//! tests and fuzzing use plain memory.

pub mod annex;
mod arch;
mod call;
mod changes;
mod counters;
mod dispatch;
mod edit;
mod error;
mod exit_plan;
mod exits;
mod ftrace;
mod guest;
mod image;
mod members;
mod module_calls;
mod module_facts;
mod module_traps;
mod modules;
mod mutex;
mod paging;
pub mod patch;
mod program_stops;
mod programs;
mod ram;
mod raw;
mod readable;
pub mod ring;
mod riscv64;
mod room;
mod scheduling;
mod selftest;
mod sets;
mod sharing;
mod spot;
mod stops;
mod strangers;
mod switch_places;
mod switches;
mod tasks;
mod touched;
mod trace;
mod tracepoints;
mod tripwire;
mod unpatched;
mod view;
mod x86_64;

pub use arch::Options;
pub use counters::{Buckets, CallerHits, Counted, Counters, Hits, Keeper, Kind, SiteTables};
pub use dispatch::{far_memory, return_address, stack_bias};
pub use edit::SkipReason;
pub use error::TraceError;
pub use exit_plan::ExitPlan;
pub use exits::{ExitSkip, ExitWord};
pub use guest::{Guest, GuestError, WalkError};
pub use image::Image;
pub use module_calls::ModuleMoment;
pub use modules::{
    Ends, ExitsError, FoundSwitches, Fresh, Loaded, Module, ModuleCoverage, ModuleError,
    ModuleFunction, ModuleSymbol, Unseen,
};
pub use paging::PageTables;
pub use patch::Skip;
pub use program_stops::Stopped;
pub use programs::{Duty, Measure, Nested, Part, Tally};
pub use ram::Ram;
pub use raw::{RawBatch, RawRecord};
pub use room::Room;
pub use scheduling::{Running, Scheduling};
pub use selftest::{Reached, Seen, SelfTest, SelfTestError};
pub(crate) use sets::Among;
pub use sharing::Lent;
pub use stops::Moment;
pub use tasks::{Offsets as TaskOffsets, Tasks};
pub use trace::{AttachReport, Attachment, Past};
pub use tracepoints::{PointReason, PointSkip};
pub use tripwire::Tripwire;
