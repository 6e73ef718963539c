//! Tracepoints that call vmtrace's probes.
//!
//! The guest changes its tracepoints under a lock. Before it waits for this lock, all tracepoints
//! are given back. They are taken again when no task has the lock or waits for it. So the guest
//! never sees the changes, and its own probes keep working.

pub(super) mod guest;
mod hold;
mod marks;
mod points;

pub use guest::PointReason;
pub use points::PointSkip;
pub(super) use points::Points;
