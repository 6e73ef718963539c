//! Exits of vCPUs as the event `host:exit`, which is no tracepoint of the guest.

use super::buffer::RecordBuffer;
use super::dictionary::Symbol;
use super::record::EventRecord;
use super::values::{Shape, ValueField, ValuesFormat, ValuesOf};
use super::wire::MAX_PID;

/// A time in which a vCPU did not run, because it had left the guest for vmtrace, or because the host ran
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostExit {
    /// When the vCPU went on, in ticks of the guest's clock.
    pub ticks: u64,
    /// For how long it was out, in nanoseconds of the host.
    pub duration_ns: u64,
    /// Why it had left the guest.
    pub reason: ExitReason,
    /// What the guest wanted to do.
    pub dir: ExitDir,
    /// Where: a port, an address, the number of a register or of an extension; else 0.
    pub address: u64,
}

macro_rules! names {
    (
        $(#[$meta:meta])*
        $name:ident { $($(#[$about:meta])* $variant:ident = $number:literal $text:literal,)* }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$about])* $variant = $number,)*
        }

        impl $name {
            /// All.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Its name in streams.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            fn shape() -> Shape {
                let named = |it: &Self| (i128::from(*it as u8), it.name().into());
                let names = Self::ALL.iter().map(named).collect();
                Shape::Enum { bytes: 1, signed: false, names }
            }
        }
    };
}

names! {
    /// Why a vCPU does not run.
    ExitReason {
        /// Anything else.
        Other = 0 "other",
        /// An access to a port.
        Io = 1 "io",
        /// An access to memory where a device is.
        Mmio = 2 "mmio",
        /// A write of a model-specific register.
        Msr = 3 "msr",
        /// A call of the SBI that KVM leaves to vmtrace.
        Sbi = 4 "sbi",
        /// An instruction that vmtrace has put there.
        Trap = 5 "trap",
        /// vmtrace wanted it to stop: for a pause, mostly.
        Kick = 6 "kick",
        /// The guest ends itself.
        Shutdown = 7 "shutdown",
        /// KVM cannot go on.
        Error = 8 "error",
        /// It waits for room in its ring.
        Full = 9 "full",
        /// It does not leave the guest for vmtrace: the host runs others.
        Preempted = 10 "preempted",
    }
}

names! {
    /// What a guest does with a device.
    ExitDir {
        /// Nothing.
        None = 0 "none",
        /// Reads.
        In = 1 "in",
        /// Writes.
        Out = 2 "out",
    }
}

impl HostExit {
    /// The event's name.
    pub const NAME: &str = "host:exit";
    /// The process id in its records: the event is no task's, and no task of Linux has it.
    pub const PID: u32 = MAX_PID;
    /// The name of its field with the duration.
    pub const DURATION: &str = "duration_ns";
    /// What stands in the place of a tracepoint's address, less the address base: the kernel has
    /// nothing there, since pointers that are errors look like that.
    const PLACE: u32 = 0xffff_ff00;

    /// What a stream is told before the first such event.
    #[must_use]
    pub fn told(address_base: u64) -> (Symbol<'static>, ValuesFormat) {
        let value = |name: &str, shape| ValueField { name: name.to_owned(), shape };
        let values = vec![
            value("reason", ExitReason::shape()),
            value("dir", ExitDir::shape()),
            value("address", Shape::Pointer),
            value(Self::DURATION, Shape::Unsigned { bytes: 8 }),
        ];
        let symbol = Symbol::new(address_base.wrapping_add(Self::PLACE.into()), 8, Self::NAME);
        let of = ValuesOf::Event;
        (symbol, ValuesFormat { function: Self::PLACE, tracer: 0, of, values, print: None })
    }

    /// Adds its record, with the time that it has among the records of its vCPU.
    pub fn write(&self, batch: &mut RecordBuffer, time: u64) {
        let event = EventRecord::new(time, Self::PLACE, 0, Self::PID);
        let words = [self.reason as u64, self.dir as u64, self.address, self.duration_ns];
        batch.push_event(event, 0, words);
    }
}
