//! Serves a running trace to other programs: consumers of the stream, and control.
//!
//! One connection is one request, made in its first line (docs/stream.md, "Asking for a stream").
//! [`Services`] reads that line of every connection. The [`Hub`] receives the stream from the
//! relay's writer, and gives every consumer a copy. Every consumer has its own queue, so that a
//! slow one loses only its own records.

mod client;
mod consumer;
mod guests;
mod hub;
mod part;
mod patience;
mod primary;
mod queue;
mod refilter;
mod request;
mod server;
mod spec;
#[cfg(test)]
mod tests;
mod trigger;
mod unsent;
mod watcher;

pub use client::{Source, accepted, ask_stream, command, command_telling};
pub use consumer::{Join, Resolve};
pub(crate) use guests::FIRST_UNPRIVILEGED_PORT;
pub use guests::GuestReaders;
pub use hub::Hub;
pub use patience::Patience;
pub use primary::{Primary, Sink, Unwritten};
pub(crate) use refilter::Refilter;
pub use request::{Control, Format, Globs, Origin, Request, RequestError, StreamRequest};
pub use server::{Answer, ControlRequest, Door, PassToAgent, Reply, Server, Services};
pub use spec::{Actions, HistogramSpec, SpecError, TracerSpec};
pub use trigger::{CommandError, CommandSpec, TriggerAction, TriggerError, TriggerSpec};
pub use watcher::{Look, Watch, Watched};
