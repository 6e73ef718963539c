//! Times in which vCPUs did not run, as events.

use super::Tracepoint;
use crate::stream::{ExitReason, HostExit, Shown};
use std::fmt::Write as _;

/// A time in which a vCPU was out of the guest, as an event `host:exit` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutOfGuest<'a> {
    /// Why, such as `io`.
    pub(crate) reason: &'a str,
    /// `in` or `out`, if a device was meant.
    dir: Option<&'a str>,
    /// Where, unless that is 0.
    address: Option<u64>,
    /// How long.
    pub(crate) duration_ns: u64,
}

impl<'a> OutOfGuest<'a> {
    /// If the event is one.
    pub(crate) fn of(event: &Tracepoint<'a>) -> Option<Self> {
        if event.event.symbol.is_none_or(|(name, _)| name != HostExit::NAME) {
            return None;
        }
        let mut out = Self { reason: "other", dir: None, address: None, duration_ns: 0 };
        for (name, shown) in event.fields?.iter() {
            match (name, shown) {
                ("reason", Some(Shown::Name(reason))) => out.reason = reason,
                ("dir", Some(Shown::Name(dir))) => out.dir = Some(dir).filter(|dir| *dir != "none"),
                ("address", Some(Shown::Pointer(at))) => {
                    out.address = Some(at).filter(|&at| at > 0);
                }
                (HostExit::DURATION, Some(Shown::Unsigned(ns))) => out.duration_ns = ns,
                _ => {}
            }
        }
        Some(out)
    }

    /// Such as `exit io 0x3f8 out`, or `preempted`.
    pub(crate) fn label(&self) -> String {
        if self.reason == ExitReason::Preempted.name() {
            return self.reason.to_owned();
        }
        let mut label = format!("exit {}", self.reason);
        if let Some(address) = self.address {
            let _ = write!(label, " {address:#x}");
        }
        if let Some(dir) = self.dir {
            let _ = write!(label, " {dir}");
        }
        label
    }
}
