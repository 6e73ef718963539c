//! Marks and reasons of loss.

use std::fmt;

/// Something that happened beside the records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// When, in clock ticks.
    pub ticks: u64,
    /// What.
    pub kind: MarkKind,
    /// How long it took, in nanoseconds of the host; zero for a point in time.
    pub duration_ns: u64,
    /// Details for people.
    pub text: String,
}

impl Mark {
    /// For how long the guest stood still until then, in nanoseconds of the host; 0: it did not.
    #[must_use]
    pub fn stood_still_ns(&self) -> u64 {
        match self.kind {
            MarkKind::Attach
            | MarkKind::Pause
            | MarkKind::Resume
            | MarkKind::Filter
            | MarkKind::Detach
            | MarkKind::Note => self.duration_ns,
            _ => 0,
        }
    }

    /// Whether beginnings or ends of calls may not have been seen from here on (docs/stream.md, "Calls").
    #[must_use]
    pub fn leaves_calls_uncertain(&self) -> bool {
        match self.kind {
            MarkKind::Exit
            | MarkKind::Agent
            | MarkKind::Note
            | MarkKind::Console
            | MarkKind::Events
            | MarkKind::Clock
            | MarkKind::User => false,
            // A guest that stops misses nothing, but where its user has paused the tracing.
            MarkKind::Pause => self.text.starts_with("tracing paused"),
            // Of functions of a module that comes or goes no call is open.
            MarkKind::Filter => !self.text.starts_with("module "),
            _ => true,
        }
    }
}

macro_rules! numbered {
    ($(#[$meta:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $number:literal $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$about])* $variant,)*
            /// A number that this version has no name for.
            Other(u32),
        }

        impl From<u32> for $name {
            fn from(number: u32) -> Self {
                match number {
                    $($number => Self::$variant,)*
                    other => Self::Other(other),
                }
            }
        }

        impl From<$name> for u32 {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => $number,)*
                    $name::Other(other) => other,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::Other(other) => write!(f, "unknown-{other}"),
                }
            }
        }
    };
}

numbered! {
    /// What a [`Mark`] marks.
    MarkKind {
        /// Tracing began: sites were patched.
        Attach = 1 "attach",
        /// All vCPUs were paused; the duration is the pause's.
        Pause = 2 "pause",
        /// The guest runs again.
        Resume = 3 "resume",
        /// The set of traced functions changed.
        Filter = 4 "filter",
        /// Tracing ended: sites were restored.
        Detach = 5 "detach",
        /// The guest ended.
        Exit = 6 "exit",
        /// Written by the guest's agent; before version 1.3 by a user of the control socket, too.
        Agent = 7 "agent",
        /// Anything that vmtrace wants to be known.
        Note = 8 "note",
        /// A line of the guest's console; the time is that of its end.
        Console = 9 "console",
        /// Other events are traced from here on; the text names them. What was open of the events
        /// before is not known any more.
        Events = 10 "events",
        /// It is known when the clock of the guest's log began; the text says it.
        Clock = 11 "clock",
        /// Written by a user of the control socket.
        User = 12 "user",
    }
}

numbered! {
    /// Why records are missing.
    LossReason {
        /// The ring was full and the policy is to drop.
        Full = 1 "ring-full",
        /// The policy is to overwrite the oldest.
        Overwritten = 2 "overwritten",
        /// The consumer was too slow; others may have received the records.
        Consumer = 3 "consumer-slow",
        /// The ring held what cannot be a record (the guest can write to it).
        Invalid = 4 "invalid",
        /// Begun but not finished when the guest ended.
        Unfinished = 5 "unfinished",
        /// Of exits of a vCPU: more came than there was room for until they were taken.
        Exits = 6 "exits-full",
    }
}
